"""Registration: transforms between overlapping images, and positions from many of them."""
