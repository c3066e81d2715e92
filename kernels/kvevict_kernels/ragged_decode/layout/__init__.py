"""What follows on the device from a batch's spans, once per batch."""
