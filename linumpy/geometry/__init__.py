"""What the microscope needs: the tissue surface and the shapes fitted to it."""
