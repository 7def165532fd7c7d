"""What translating a Messages request changes or leaves out, gathered for the record."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attrs import Factory, define

# Claude Code opens its system text with such a line. It differs from call to call, so that no
# prompt would extend another.
_BILLING_LINE = re.compile(r"x-anthropic-billing-header:[^\n]*(?:\n|\Z)")


@define
class Notes:
    """The changes, by kind; ``generated`` is what the model wrote as arguments, by call id."""

    generated: Mapping[str, str]
    billing_lines: list[str] = Factory(list)
    cache_control: int = 0
    arguments_restored: list[str] = Factory(list)
    deferred_tools: list[str] = Factory(list)
    redacted_thinking: int = 0
    dropped: list[str] = Factory(list)

    def see(self, block: Mapping[str, Any]) -> None:
        """Count the cache mark of a block or tool; it is left out of what is built from it."""
        if block.get("cache_control") is not None:
            self.cache_control += 1

    def without_billing(self, text: str) -> str:
        """Return a system text without the billing lines at its head."""
        while match := _BILLING_LINE.match(text):
            self.billing_lines.append(match[0].rstrip("\n"))
            text = text[match.end() :]
        return text

    def normalised(self) -> dict[str, Any]:
        """Return the changes for the record."""
        return {
            "billing_lines": self.billing_lines,
            "cache_control": self.cache_control,
            "arguments_restored": self.arguments_restored,
            "deferred_tools": self.deferred_tools,
            "redacted_thinking": self.redacted_thinking,
            "dropped": self.dropped,
        }
