"""A policy leaves nothing in the model, its copies, its pickles, or after a forward that broke off."""

import copy
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode

import dsq
from dsq.stash import apply, measure
from dsq.stash.controller import RUNNING, applied, run_under, suspend
from dsq.stash.interception import innermost_hooks
from tests.dsq.gradients import saving
from tests.dsq.stash.every_policy import NAMES, PAIRS, small, snapshot, train


@pytest.mark.parametrize("name", NAMES)
def test_a_deep_copy_keeps_the_policy_and_is_freed_of_it_alone_and_a_pickle_is_refused(name):
    model, plain, x = small(), small(), torch.randn(2, 8, 32)
    before = snapshot(plain)
    controller = apply(model, name)
    twin = copy.deepcopy(model)
    twin(x).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in twin.parameters())
    assert measure(lambda: twin(x).sum()).nbytes == measure(lambda: model(x).sum()).nbytes
    with pytest.raises(ValueError, match="already applied"):
        apply(twin, name)
    with pytest.raises(TypeError, match=r"cannot be pickled: .*dsq\.unconvert\(copy\.deepcopy\(model\)\)"):
        pickle.dumps(model)
    pickle.loads(pickle.dumps(model.state_dict()))
    controller.remove(twin)
    assert snapshot(twin) == before
    assert applied(model) == {name: controller}
    assert train(pickle.loads(pickle.dumps(twin))) == train(twin) == train(plain)
    controller.remove(twin)  # a second time: nothing
    late = copy.deepcopy(model)
    controller.remove()
    assert snapshot(model) == before
    controller.remove(late)
    assert snapshot(late) == before
    apply(late, name)


@pytest.mark.parametrize("names", [*((name,) for name in NAMES), *PAIRS], ids="+".join)
def test_a_forward_that_is_interrupted_is_left(names):
    model, x = small(), torch.randn(8, 16, 32)
    controllers = [apply(model, name) for name in names]
    model(x).sum().backward()
    held = measure(lambda: model(x).sum()).nbytes

    def interrupt(*_):
        raise KeyboardInterrupt

    def interrupted():
        handle = list(model.modules())[-1].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(x)
        handle.remove()

    interrupted()
    assert _nothing_entered()
    assert measure(lambda: model(x).sum()).nbytes == held
    interrupted()
    for controller in controllers:
        controller.remove()
    assert _nothing_entered()


def test_no_line_of_entering_a_policy_is_one_at_which_ctrl_c_leaves_it_entered():
    """A signal comes between two lines; a trace function raises there."""
    model, x, lines = small(), torch.randn(1, 4, 32), 0
    apply(model, "bfp")
    while True:
        left = iter(range(lines, -(10**6), -1))

        def trace(frame, event, _, left=left):
            if frame.f_code is run_under.__code__:
                if event == "line" and next(left) == 0:
                    raise KeyboardInterrupt
                return trace
            return None

        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            model(x)
        except KeyboardInterrupt:
            interrupted = True
        else:
            interrupted = False
        finally:
            sys.settrace(previous)
        assert _nothing_entered()
        assert not RUNNING.stashes
        if not interrupted:
            break
        lines += 1
    assert lines > 5  # each of which was one


def _nothing_entered():
    return innermost_hooks() is None and _get_current_function_mode() is None and not RUNNING.entered


def test_threads_do_not_see_each_other():
    """nn.DataParallel runs replicas in threads."""
    model = small()
    apply(model, "bfp")

    def work(_):
        model(torch.randn(1, 4, 32)).sum().backward()
        return tuple(RUNNING.entered.items())

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(work, range(3))) == [()] * 3


def test_a_suspension_is_of_all_threads_and_lasts_until_the_outermost_ends():
    """Autograd recomputes a checkpoint's segment in a thread of its own for a GPU."""
    model = small()
    apply(model, "bfp")

    def packs():
        return any(t.dtype == torch.uint8 for t in saving(model, torch.randn(2, 16, 32))[1])

    with suspend():
        with suspend():
            pass
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(packs).result()
    assert packs()


def test_a_model_and_its_copy_are_reported_in_either_order_and_unconverted_alone():
    x = torch.randn(8, 64)
    for copy_first in (False, True):
        model = dsq.convert(nn.Sequential(nn.Linear(64, 64)), "[8,4,8,8]")
        twin = copy.deepcopy(model)
        for reported in (twin, model) if copy_first else (model, twin):
            dsq.report(reported, x)
        dsq.unconvert(twin)
        dsq.unconvert(model)
        for net in (twin, model):
            net(x).sum().backward()
            assert not net._forward_pre_hooks
