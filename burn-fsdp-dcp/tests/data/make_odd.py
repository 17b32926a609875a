import torch, torch.distributed.checkpoint as dcp
d='dcp_torch_odd'
sd={
 "transposed": torch.arange(12,dtype=torch.int32).reshape(3,4).t(),
 "channels_last": torch.arange(2*3*2*2,dtype=torch.float32).reshape(2,3,2,2).to(memory_format=torch.channels_last),
 "view": torch.arange(20,dtype=torch.int16)[5:12],
 "u16": torch.tensor([1,2,65535],dtype=torch.uint16),
 "u64": torch.tensor([[2**63]],dtype=torch.uint64),
 "bool": torch.tensor([True,False]),
 "empty": torch.zeros(0,3),
 "scalar": torch.tensor(2.5,dtype=torch.float64),
 "values": {"seed": 2**64-1, "negative": -2**40, "dict": {}, "nested": ((1,[2.5,None]),"x"), "torch": torch.Size([2]), "long": "n"*300},
}
dcp.save(sd, checkpoint_id=d, no_dist=True)
torch.serialization.set_crc32_options(False)
dcp.save({"w": torch.arange(4.)}, checkpoint_id='dcp_torch_no_crc', no_dist=True)
