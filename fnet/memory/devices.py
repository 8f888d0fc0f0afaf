"""The devices that can be compiled for by name: their figures, and where each comes from."""

from typing import NamedTuple


class Gpu(NamedTuple):
    """What XLA's compiler asks of an NVIDIA GPU; the rest follows from its compute capability.

    Attributes:
      device: the driver's name of it.
      compute_capability: major and minor.
      cores: streaming multiprocessors.
      clock_ghz: of these, at most.
      memory: bytes of the device, as its driver reports them. They differ by up
        to 2% between drivers.
      bandwidth: of its memory, bytes per second.
      l2_cache: bytes.
    """

    device: str
    compute_capability: tuple[int, int]
    cores: int
    clock_ghz: float
    memory: int
    bandwidth: int
    l2_cache: int

    def as_text(self) -> str:
        """XLA's ``GpuTargetConfigProto``; what is a number here is the same for all of them."""
        major, minor = self.compute_capability
        threads, shared, shared_by_one_block, fp32_lanes = _OF_CAPABILITY[self.compute_capability]
        return f"""
            gpu_device_info {{
              name: "{self.device}"
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              core_count: {self.cores}
              fpus_per_core: {fp32_lanes}
              clock_rate_ghz: {self.clock_ghz}
              device_memory_size: {self.memory}
              memory_bandwidth: {self.bandwidth}
              l2_cache_size: {self.l2_cache}
              shared_memory_per_core: {shared}
              shared_memory_per_block: 49152
              shared_memory_per_block_optin: {shared_by_one_block}
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              threads_per_core_limit: {threads}
              threads_per_block_limit: 1024
              threads_per_warp: 32
              thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              driver_version: "13.0.0"
              runtime_version: "12.9.0"
              compile_time_toolkit_version: "12.9.0"
              dnn_version: "9.10.0"
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
            device_description_str: "{self.device}"
        """


# Of a streaming multiprocessor: resident threads, bytes of shared memory, those
# that one block can opt in to, float32 operations a cycle. The CUDA C++
# programming guide, "Compute Capabilities" and "Arithmetic Instructions"; the
# first three are also in libcu++'s cuda/__device/arch_traits.h.
_OF_CAPABILITY = {
    (7, 5): (1024, 65_536, 65_536, 64),
    (8, 0): (2048, 167_936, 166_912, 64),
    (8, 9): (1536, 102_400, 101_376, 128),
    (9, 0): (2048, 233_472, 232_448, 128),
    (10, 0): (2048, 233_472, 232_448, 128),
    (12, 0): (1536, 102_400, 101_376, 128),
}


class Tpu(NamedTuple):
    """What XLA's compiler asks of a TPU: little more than its name.

    Attributes:
      topology: the smallest slice of a whole host, of which one chip is used.
      memory: HBM that the compiler lets a program fill, in bytes, as its own
        message says where one does not fit.
    """

    topology: str
    memory: int


def _gibibytes(n: float) -> int:
    return int(n * 2**30)


# "XLA": openxla/xla, xla/backends/gpu/target_config/specs. "deviceQuery": the
# CUDA sample's output, as published; bandwidth = 2 x memory clock x bus width.
TARGETS: dict[str, Gpu | Tpu] = {
    # XLA, a100_sxm_80.txtpb: the 80 GB one on an SXM4 board.
    "a100": Gpu(
        device="NVIDIA A100-SXM4-80GB",
        compute_capability=(8, 0),
        cores=108,
        clock_ghz=1.41,
        memory=85_100_068_864,
        bandwidth=2_039_040_000_000,
        l2_cache=41_943_040,
    ),
    # XLA, h100_sxm.txtpb.
    "h100": Gpu(
        device="NVIDIA H100 80GB HBM3",
        compute_capability=(9, 0),
        cores=132,
        clock_ghz=1.98,
        memory=84_942_979_072,
        bandwidth=3_352_320_000_000,
        l2_cache=52_428_800,
    ),
    # XLA, h200.txtpb; but memory and cache as CUDA reports them (cudaDeviceProp,
    # in many published logs): XLA's file has the data sheet's 141 "GB" in GiB.
    "h200": Gpu(
        device="NVIDIA H200",
        compute_capability=(9, 0),
        cores=132,
        clock_ghz=1.98,
        memory=150_109_880_320,
        bandwidth=4_800_000_000_000,
        l2_cache=62_914_560,
    ),
    # XLA, b200.txtpb.
    "b200": Gpu(
        device="NVIDIA B200",
        compute_capability=(10, 0),
        cores=148,
        clock_ghz=1.965,
        memory=191_514_411_008,
        bandwidth=7_672_320_000_000,
        l2_cache=132_644_864,
    ),
    # deviceQuery, CUDA 12.4: 10501 MHz, 384 bit.
    "rtx4090": Gpu(
        device="NVIDIA GeForce RTX 4090",
        compute_capability=(8, 9),
        cores=128,
        clock_ghz=2.52,
        memory=25_386_352_640,
        bandwidth=1_008_096_000_000,
        l2_cache=75_497_472,
    ),
    # deviceQuery, CUDA 12.8 (NVIDIA/nccl issue 1637): 14001 MHz, 512 bit; the clock
    # is that of NVIDIA's own card (Blackwell architecture white paper).
    "rtx5090": Gpu(
        device="NVIDIA GeForce RTX 5090",
        compute_capability=(12, 0),
        cores=170,
        clock_ghz=2.407,
        memory=33_680_457_728,
        bandwidth=1_792_128_000_000,
        l2_cache=100_663_296,
    ),
    # deviceQuery, CUDA 12.2 (bottlerocket-os/bottlerocket-kernel-kit pull request
    # 139) and 11.8: 6251 MHz, 192 bit.
    "l4": Gpu(
        device="NVIDIA L4",
        compute_capability=(8, 9),
        cores=58,
        clock_ghz=2.04,
        memory=23_583_784_960,
        bandwidth=300_048_000_000,
        l2_cache=50_331_648,
    ),
    # deviceQuery, CUDA 11.2: 5001 MHz, 256 bit; memory as driver 580, which CUDA
    # 13 needs, reports it (cudaDeviceProp on Colab).
    "t4": Gpu(
        device="Tesla T4",
        compute_capability=(7, 5),
        cores=40,
        clock_ghz=1.59,
        memory=15_637_086_208,
        bandwidth=320_064_000_000,
        l2_cache=4_194_304,
    ),
    # "... exceeds available HBM (15.75G)": libtpu 0.0.42.
    "v5e": Tpu(topology="v5e:2x2", memory=_gibibytes(15.75)),
    "v5p": Tpu(topology="v5p:2x2x1", memory=_gibibytes(95.74)),
    "v6e": Tpu(topology="v6e:2x2", memory=_gibibytes(31.25)),
}
"""The devices that can be described, by name."""
