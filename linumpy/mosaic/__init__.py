"""What makes one volume of many: slices of tissue, one below the other."""
