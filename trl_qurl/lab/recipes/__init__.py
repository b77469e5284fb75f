"""Complete training runs, each one function that a script and the command line share."""
