"""Description of a machine, for the tests of benchmarks."""

MACHINE = {
    "cpu": "A CPU",
    "cores": 2,
    "memory_bytes": 8 * 2**30,
    "system": "Linux",
    "python": "3.11.1",
    "devices": ["2 x cpu"],
}
