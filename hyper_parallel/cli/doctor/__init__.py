"""``hyper-parallel doctor``: what is wrong with an installation, and one remedy for each problem.

It reads versions, device files, CANN and the variables of a distributed job without importing a framework; asks
each framework, in a process of its own, for the devices that it can use; and tries an all-reduce and
``clip_grad_norm_`` on them, one process a device (two on the CPU): gloo, NCCL and HCCL for torch, MCCL and HCCL for
MindSpore. What was run so far is gloo and MCCL on the CPU; NCCL and HCCL were not, for want of the machines.

Exit status: 0 if there is no error (warnings alone do not count), 1 if there is one, 2 for wrong usage.

``--json`` prints one object. Keys stay what they are; a change of meaning raises ``format``. Null stands for what is
not there.

==============  ============================================================================================
top             ``format``, ``healthy`` (no error), ``hyper_parallel`` (version), and the following
python          ``version``, ``executable``
system          ``name``, ``cpu_cores``
packages        versions of ``torch``, ``torch_npu``, ``mindspore``, ``numpy``, as installed
devices         ``npu_files``, ``denied`` (files of NPUs that this user may not open), ``driver`` (version of
                Ascend's), ``npu_smi`` (path), ``cuda_files``
cann            ``variables`` that are set, ``missing`` (those that name no folder), ``library`` (folder of
                libascendcl.so), ``version``, ``scripts`` (set_env.sh)
variables       those of a distributed job that are set
selection       ``name`` of the platform that a process gets, ``reason``, ``variable`` (the value of
                HYPER_PARALLEL_PLATFORM), ``choices``, ``available`` (installed)
platforms       a list: ``name``, ``installed``, ``imports`` ({package: error or null}), ``devices`` (a list of
                ``type``, ``backend``, ``names``), ``error`` (of the process that asked), ``no_npu`` (why the
                framework cannot use one), ``cann_versions`` (those it names as its own),
                ``has_scheduler`` (whether its ranks need one more process to meet)
checks          a list: ``platform``, ``device``, ``backend``, ``ranks``, ``call``, ``expected`` and ``found`` (of
                all ranks, one after another), ``error``, ``seconds`` (both calls and the start), ``passed``
problems        a list, errors first: ``rule``, ``severity`` (error or warning), ``problem``, ``remedy``
==============  ============================================================================================

``call`` is ``all_reduce`` (each rank's sum) or ``clip_grad_norm_`` (each rank's norm and its clipped elements).
"""
