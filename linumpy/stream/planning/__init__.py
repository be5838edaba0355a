"""Planning of reads and of resampling: samples and arrays → frozen records. Pure."""
