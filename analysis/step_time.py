"""step_time.py HARDWARE.toml [names]: predicted vs measured step (fwd, bwd, fused Adam)."""
import sys, gc, torch
from statistics import median
import dsq
from dataclasses import replace
from analysis.models import transformer
from analysis.timing import in_turns
from dsq.process_memory import keep_freed_memory
from dsq.costmodel.hardware.hardware import load_hardware
from dsq.costmodel.model.methods import Method, Setup, DSQ, FP32, AUTOCAST, whole_stash
from dsq.costmodel.planning.step import step_time
from dsq.precision import Precision
from tests.costmodel.model.running import workload_of
torch.set_num_threads(int(__import__('os').environ.get("OMP_NUM_THREADS", "1")))
L, W = 128, 4000
M = {
 "gpt2": ((256,4,4,4), {"n_positions": L, "activation_function":"gelu"}),
 "gpt2 gelu_new": ((256,4,4,4), {"n_positions": L}),
 "llama": ((512,2,8,4), {"intermediate_size":1408}),
 "bert": ((256,4,4,8), {}),
 "opt": ((384,3,6,4), {}),
 "gpt_neox": ((768,2,12,2), {}),
 "qwen2": ((256,6,4,8), {"intermediate_size":768}),
 "t5": ((256,3,4,8), {}),
}
level = Precision.parse("[8,4,8,8]")
dsetup = Setup(DSQ, level, container=32)
S = {
 "fp32": Method("fp32", FP32),
 "bf16 autocast": Method("a", AUTOCAST),
 "[8,4,8,8]": Method("l", dsetup),
 "[8,4,8,8] all": Method("w", dsetup, stash=whole_stash(dsetup)),
}
keep_freed_memory()
hw = load_hardware(sys.argv[1])
attn = sys.argv[2]
errs = {}
def made(name):
    torch.manual_seed(0)
    (w,b,h,s),f = M[name]
    return transformer(name.split()[0], w,b,h,W,(s,L),attn,**f)
def step(name, setup):
    model, inputs = made(name)
    if setup.startswith("["):
        dsq.convert(model, "[8,4,8,8]", **({"stash":"all"} if setup.endswith("all") else {}))
    opt = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    def run():
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=setup.startswith("bf16")):
            loss = model(**inputs).loss
        loss.backward(); opt.step()
    return run
for name in (sys.argv[3:] or M):
    model, inputs = made(name)
    n = len(inputs["labels"])
    lengths = {"bert":{"source_length":L}, "t5":{"source_length":L,"target_length":L}}.get(name, {"target_length":L})
    wl = workload_of(model, n, **lengths)
    sec = in_turns({s: step(name,s) for s in S}, 6, repeats=1, warm=3)
    for s, m in S.items():
        p, t = step_time(wl, m, hw), min(sec[s])
        off = p.seconds/t-1
        errs.setdefault(s, []).append(off)
        print(f"{name:14} {attn:6} {s:14} measured {1e3*t:7.1f} predicted {1e3*p.seconds:7.1f} (compute {1e3*p.compute:.0f} pack {1e3*p.packing:.1f} update {1e3*p.update:.1f}) {off:+.1%}", flush=True)
    gc.collect()
for s,e in errs.items(): print(s, f"median {median(e):+.1%} abs {median(map(abs,e)):.1%} worst {max(e,key=abs):+.1%}")
a=[abs(x) for e in errs.values() for x in e]; print("all", f"{median(a):.1%} {max(a):.1%}")
