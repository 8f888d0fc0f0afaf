"""The program around fnet: configs, data, the loop, and everything that touches the world."""
