"""[2] Generator (prototype)."""

import asyncio, itertools, os
import torch
from forge.controller import ForgeActor, endpoint
from forge.data_models import Completion
from forge.observability import record


class Generator(ForgeActor):
    compute_bound = True
    driver_only = True

    def __init__(self, engine_config, sampling_config, seed=0):
        self.ec, self.sc, self.seed = engine_config, sampling_config, seed

    @classmethod
    def bootstrap_env(cls):
        return dict(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            TORCHDYNAMO_DISABLE="1",
            HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL="WARNING",
        )

    @classmethod
    async def prepare(cls):
        from forge.weights import open_store

        await open_store()

    async def setup(self):
        from forge.actors import _vllm

        self.v = _vllm
        self.eng = await self.run_blocking(
            _vllm.build, self.ec, self.seed * 1000 + int(os.environ.get("FORGE_REPLICA", 0))
        )
        self.q, self.ctl, self.futs, self.n = [], [], {}, itertools.count()
        self.ev = asyncio.Event()
        self.task = asyncio.create_task(self._loop())
        self._version = 0

    def _work(self, new, ctl):
        res = []
        for rid, prompt, sp, fut in new:
            try:
                self.eng.add_request(rid, prompt, sp)
                self.futs[rid] = fut
            except Exception as e:
                res.append((fut, None, e))
        for fn, fut in ctl:
            try:
                res.append((fut, fn(), None))
            except Exception as e:
                res.append((fut, None, e))
        if self.eng.has_unfinished_requests():
            for o in self.eng.step():
                if o.finished:
                    res.append(
                        (self.futs.pop(o.request_id), [self._completion(o, c) for c in o.outputs], None)
                    )
        return res

    def _completion(self, o, c):
        ids = torch.tensor(c.token_ids)
        lps = torch.tensor([d[t].logprob for t, d in zip(c.token_ids, c.logprobs)])
        vs = torch.cat([torch.full((s.end - s.start,), int(s.version)) for s in c.weight_versions])
        return Completion(
            text=c.text,
            token_ids=ids,
            logprobs=lps,
            prompt_ids=torch.tensor(o.prompt_token_ids),
            generator_version=int(vs.min()),
            token_versions=vs,
            stop_reason=c.finish_reason,
            temperature=self.sc.get("temperature", 1.0),
        )

    async def _loop(self):
        while True:
            if not (self.q or self.ctl or self.futs):
                self.ev.clear()
                await self.ev.wait()
            new, self.q = self.q, []
            ctl, self.ctl = self.ctl, []
            for fut, val, e in await self.run_blocking(self._work, new, ctl):
                if not fut.done():
                    fut.set_exception(e) if e else fut.set_result(val)

    def _submit(self, lst, *item):
        f = asyncio.get_running_loop().create_future()
        lst.append((*item, f))
        self.ev.set()
        return f

    @endpoint
    async def generate(self, prompt, **kw):
        sp = self.v.SamplingParams(
            logprobs=0, output_kind=self.v.RequestOutputKind.FINAL_ONLY, **{**self.sc, **kw}
        )
        out = await self._submit(self.q, str(next(self.n)), prompt, sp)
        record("generator", num_tokens=sum(len(c.token_ids) for c in out))
        record(
            "completion",
            length=sum(len(c.token_ids) for c in out) / len(out),
            stopped=sum(c.stop_reason == "stop" for c in out) / len(out),
        )
        return out

    @endpoint
    async def update_weights(self, version):
        from forge.weights import fetch

        tensors = await fetch(version)

        def load():
            self.eng.collective_rpc("forge_load", args=(tensors,))
            assert self.eng.reset_prefix_cache(reset_running_requests=True)
            self.eng.set_weight_version(str(version))

        await self._submit(self.ctl, load)
