"""The demo in parts: programs, measurements, systems under test, table, picture."""
