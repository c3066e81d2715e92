"""The cache's event stream and the questions it answers: wire format, publishing thread, clients."""
