"""Rewards from a function or a server of the user."""

import pytest

PROBE = """
import asyncio
import socket

import torch

on_cpu()
from openrlhf.utils.agent import SingleTurnAgentExecutor

FUNCTIONS = {
    "raises": ("raise KeyError('answer')", "KeyError: 'answer'"),
    "forgets": ("pass", "ValueError: the answer has no rewards: None"),
    "misnames": ("return {'score': [1.0]}", "ValueError: the answer has no rewards: {'score': [1.0]}"),
}


async def generate(*_, **__):
    answer = stub("vLLM's completion", token_ids=[5, 6], finish_reason="stop", logprobs=None)
    return stub("vLLM's answer", outputs=[answer])


def tokenizer(text, **_):
    return {"input_ids": torch.tensor([[1, 2, 3]])}


tokenizer.decode = lambda tokens, **_: "text"
sampling = stub("vLLM's SamplingParams", max_tokens=8, logprobs=None)
engine = stub("vLLM's engine", generate=generate)


def rewarded(source):
    executor = SingleTurnAgentExecutor(source)
    return asyncio.run(executor.execute("question", "label", sampling, 64, tokenizer, engine))["reward"]


for name, (body, cause) in FUNCTIONS.items():
    file = Path(f"{name}.py")
    file.write_text(f"def reward_func(queries, prompts, labels):\\n    {body}\\n")
    try:
        found = f"reward {rewarded(str(file))}"
    except RuntimeError as error:
        found = str(error)
    assert found == f"no reward from {file}: {cause}", f"a function that {name}: {found}"
Path("works.py").write_text("def reward_func(*_):\\n    return {'rewards': [0.5]}\\n")
assert rewarded("works.py") == [0.5]


def server_of(head):
    async def answer(reader, writer):
        writer.write(head.encode())
        await reader.read()
        writer.close()

    return asyncio.start_server(answer, "127.0.0.1", 0)


async def rewarded_by_servers(urls):
    executor = SingleTurnAgentExecutor(urls)
    return await asyncio.gather(
        *(executor.execute("question", "label", sampling, 64, tokenizer, engine) for _ in urls),
        return_exceptions=True,
    )


async def failing_servers():
    end = "\\r\\n"
    refusing = await server_of(f"HTTP/1.1 500 Broken{end}Content-Length: 0{end}{end}")
    json = f"Content-Type: application/json{end}Content-Length: 4"
    babbling = await server_of(f"HTTP/1.1 200 OK{end}{json}{end}{end}text")
    with socket.socket() as absent:
        absent.bind(("127.0.0.1", 0))  # and does not listen
        sockets = refusing.sockets[0], absent, babbling.sockets[0]
        urls = [f"http://127.0.0.1:{one.getsockname()[1]}/" for one in sockets]
        return urls, await rewarded_by_servers(urls)


CAUSES = "ClientResponseError: 500", "ClientConnectorError: Cannot connect", "JSONDecodeError: Expecting"
urls, errors = asyncio.run(failing_servers())
for url, cause, error in zip(urls, CAUSES, errors, strict=True):
    attempts = f"RuntimeError: 5 requests to {url} failed, the last with {cause}"
    assert str(error).startswith(f"no reward from {', '.join(urls)}: {attempts}"), error
    assert type(error.__cause__.__cause__).__name__ == cause.split(":")[0], "the cause is not chained"
print("a failed reward is reported with its cause")
"""


@pytest.mark.patch("openrlhf/0.11.2/0071-name-the-cause-of-a-missing-reward")
def test_a_failed_reward_is_reported_with_its_cause(proves):
    proves(PROBE, "AssertionError: a function that raises: reward None")
