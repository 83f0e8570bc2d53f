"""DeepSeek-V4 attention decode under tensor parallelism: each rank's heads fitted to the kernel that runs them."""

__version__ = "0.1.0"
