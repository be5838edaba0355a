"""Planning of the encoders on the device: memory and launches."""
