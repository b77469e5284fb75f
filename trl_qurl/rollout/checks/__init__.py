"""What can work, and whether a sync worked: nobody has to open this room."""
