"""The PyTorch adapter: CPU with gloo, CUDA with NCCL, Ascend (torch_npu) with HCCL."""
