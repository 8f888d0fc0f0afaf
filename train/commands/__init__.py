"""The commands of the `fnet` program, one file each."""
