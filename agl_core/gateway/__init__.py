"""The request path: from an agent's call to a model server and back, captured on the way."""
