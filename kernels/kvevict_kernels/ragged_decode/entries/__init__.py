"""How a kernel reads a directory."""
