"""Inspection of the cache over a socket: questions and answers, the thread that serves them, a client."""
