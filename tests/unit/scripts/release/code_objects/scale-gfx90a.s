// Assembled by LLVM 14: llvm-mc -triple=amdgcn-amd-amdhsa -mcpu=gfx90a -filetype=obj -o scale-gfx90a.o scale-gfx90a.s
.amdgcn_target "amdgcn-amd-amdhsa--gfx90a"
.text
.globl scale
.type scale,@function
scale:
  s_endpgm
.amdgpu_metadata
---
amdhsa.version: [1, 2]
amdhsa.target: amdgcn-amd-amdhsa--gfx90a
amdhsa.kernels:
  - .name: scale
    .symbol: scale.kd
    .kernarg_segment_size: 8
    .kernarg_segment_align: 8
    .group_segment_fixed_size: 1024
    .private_segment_fixed_size: 16
    .wavefront_size: 64
    .sgpr_count: 8
    .vgpr_count: 4
    .sgpr_spill_count: 2
    .vgpr_spill_count: 3
    .max_flat_workgroup_size: 256
    .args: []
...
.end_amdgpu_metadata
