"""``agl demo``: a tiny trainable model server, an agent and a training loop, all real, on a CPU."""
