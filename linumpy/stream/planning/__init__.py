"""What is read for a batch and what is made of it: samples and arrays → frozen records. Pure."""
