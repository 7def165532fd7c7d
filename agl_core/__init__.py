"""agl-lite: capture, store and execution of LLM agents for reinforcement learning."""

__version__ = "0.1.0"
