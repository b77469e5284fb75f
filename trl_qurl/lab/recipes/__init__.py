"""Complete training runs, each behind one function that a script and the command line share."""
