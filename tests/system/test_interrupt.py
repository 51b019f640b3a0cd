import signal
import threading

import pytest
from engines import greedy
from traced import prompts_of

from slotzero import LLM, SamplingParams
from slotzero.errors import StepFailedError
from slotzero.system.interrupt import uninterrupted

pytestmark = pytest.mark.slow


def test_an_interrupt_waits_for_the_end_of_the_block():
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done.append("the rest of the step")
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_thread_is_not_interrupted():
    seen = []

    def work():
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_an_interrupted_generate_leaves_a_usable_engine(oracles):
    oracle = oracles("llama")
    llm = LLM(oracle.path, backend="eager", skip_tokenizer_init=True, show_progress=False)
    prompts = prompts_of([20, 5, 9], oracle.vocab_size)
    expected = llm.generate(prompts, greedy(), use_tqdm=False)
    run, calls = llm.engine.worker.run, []

    def interrupting(step):
        calls.append(step)
        if len(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return run(step)

    llm.engine.worker.run = interrupting
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, greedy(), use_tqdm=False)
    llm.engine.check()
    again = llm.generate(prompts, greedy(), use_tqdm=False)
    assert len(expected) == len(again) == 3
    llm.engine.check()


@pytest.mark.parametrize("place", ["add", "cancel"])
def test_an_interrupt_between_steps_leaves_no_request_behind(oracles, place):
    """One interrupt comes while requests are added, a second one while they are cancelled."""
    oracle = oracles("llama")
    llm = LLM(oracle.path, backend="eager", skip_tokenizer_init=True, show_progress=False)
    prompts = prompts_of([20, 5, 9, 7], oracle.vocab_size)
    schedulers, calls = llm.engine.schedulers, []
    add, cancel = schedulers.add, llm.engine.cancel

    def interrupting(call):
        def interrupted(*given):
            calls.append(given)
            result = call(*given)
            if len(calls) == 2:
                signal.raise_signal(signal.SIGINT)
            return result

        return interrupted

    if place == "add":
        schedulers.add = interrupting(add)
    else:
        run = llm.engine.worker.run
        llm.engine.worker.run = lambda step: signal.raise_signal(signal.SIGINT) or run(step)
        llm.engine.cancel = interrupting(cancel)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, greedy(), use_tqdm=False)
    assert len(calls) == (2 if place == "add" else 4)
    assert not schedulers.has_work
    assert not llm.engine._handles
    llm.engine.check()


def test_a_request_whose_output_text_fails_is_not_queued(monkeypatch):
    llm = LLM("tiny:llama", backend="eager", max_model_len=64, show_progress=False)

    def fail(*_):
        raise RuntimeError("no text")

    monkeypatch.setattr("slotzero.llm.OutputText", fail)
    with pytest.raises(RuntimeError, match="no text"):
        llm.generate([[1, 2, 3]], use_tqdm=False)
    assert not llm.engine.has_work


def test_a_step_that_fails_leaves_no_false_prefix(oracles):
    """The pages of its prompt were promised to the cache, but never computed."""
    oracle = oracles("llama")
    llm = LLM(oracle.path, backend="eager", skip_tokenizer_init=True, show_progress=False)
    (prompt,) = prompts_of([60], oracle.vocab_size)
    run = llm.engine.worker.run

    def failing(step):
        raise RuntimeError("the device is gone")

    llm.engine.worker.run = failing
    with pytest.raises(RuntimeError, match="the device is gone"):
        llm.generate(prompt, use_tqdm=False)
    llm.engine.worker.run = run
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    assert output.outputs[0].token_ids == oracle.generate(prompt["prompt_token_ids"], 20)[0]
    assert output.num_cached_tokens == 0
    llm.engine.check()


def test_lost_results_leave_no_request_waiting(oracles):
    oracle = oracles("llama")
    llm = LLM(oracle.path, backend="eager", skip_tokenizer_init=True, show_progress=False)
    prompts = prompts_of([9, 20], oracle.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    stream = llm.stream(prompts[0], params)
    next(stream)
    commit = llm.engine.schedulers[0].commit

    def failing(step, tokens):
        raise RuntimeError("the copy is lost")

    llm.engine.schedulers[0].commit = failing
    with pytest.raises(RuntimeError, match="the copy is lost"):
        llm.generate(prompts[1], params, use_tqdm=False)
    llm.engine.schedulers[0].commit = commit
    with pytest.raises(StepFailedError, match="RuntimeError: the copy is lost"):
        next(stream)
    (output,) = llm.generate(prompts[1], params, use_tqdm=False)
    assert output.outputs[0].token_ids == oracle.generate(prompts[1]["prompt_token_ids"], 20)[0]
    llm.engine.check()


def test_threads_may_share_one_llm(oracles):
    oracle = oracles("llama")
    llm = LLM(oracle.path, backend="eager", skip_tokenizer_init=True, show_progress=False)
    prompts = prompts_of([9, 20, 5], oracle.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = [oracle.generate(p["prompt_token_ids"], 12)[0] for p in prompts]
    wrong = []

    def work():
        for _ in range(4):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            got = [output.outputs[0].token_ids for output in outputs]
            wrong.extend(pair for pair in zip(got, expected, strict=True) if pair[0] != pair[1])

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    llm.engine.check()
