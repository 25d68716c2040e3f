"""The start of a script with a fake CUDA runtime; the script sets its answers, `free` in bytes."""

ON_CUDA = """
import torch

class Device:  # what the CUDA runtime says of one
    free, reserved, capturing, broken, asked = {free}, 0, False, False, 0

def mem_get_info():
    Device.asked += 1
    assert not Device.capturing, "no query is allowed while a graph is captured"
    if Device.broken:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return Device.free, 2**40

def get_device_name():
    if Device.broken:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return "Fake Card"

class Properties:
    uuid = "3c1f-slice-2"

torch.cuda.get_device_properties = Properties
torch.cuda.is_initialized = lambda: True
torch.cuda.get_device_name = get_device_name
torch.cuda.max_memory_allocated = lambda: 0
torch.cuda.memory_reserved = torch.cuda.max_memory_reserved = lambda: Device.reserved
torch.cuda.is_current_stream_capturing = lambda: Device.capturing
torch.cuda.mem_get_info = mem_get_info

def train(steps=1):
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter])
    for _ in range(steps):
        parameter.sum().backward()
        optimizer.step()
"""
