"""Complete training runs, shared by example scripts and the command line."""
