"""vLLM's own scheduler with our scheduler side, and a worker that is simulated.

Instead of numbers it keeps in each block what they stand for: which tokens, and whether they were
computed from all before them.
"""

from types import SimpleNamespace

from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from oasiskv.vllm.manager import OasisManager
from oasiskv.vllm.messages import OasisAck
from oasiskv.vllm.scheduling import state_of
from oasiskv.vllm.settings import config_of
from oasiskv.vllm.spec import OasisSpec
from plugin.simulated_parts import (
    BLOCK_BYTES,
    SIZE,
    VOCABULARY,
    Content,
    SimulatedRequest,
    next_token,
)


class Simulation:
    """Requests added, stepped, preempted and aborted; each step checks what is read and found.

    Args:
        vllm_config: of ``simulated_config``.
        draw: a ``random.Random``: drafts that are accepted, writes that are late.
        pool_blocks: of vLLM's pool.
        late: how often a write does not arrive in the step that made it.
    """

    def __init__(self, vllm_config, draw, pool_blocks, late=0.0):
        self.config = config_of(vllm_config)
        sizes = {"num_kv_heads": 1, "head_size": 32, "dtype": vllm_config.model_config.dtype}
        spec = OasisSpec(
            block_size=SIZE,
            **sizes,
            sink_blocks=self.config.sink_blocks,
            hot_blocks=self.config.hot_blocks,
            window_blocks=self.config.window_blocks,
            threshold_tokens=self.config.resolved_threshold_tokens,
            block_bytes=BLOCK_BYTES,
            digest_bytes=1,
            mode=self.config.mode,
        )
        # Of vLLM's description of the tensors, which differs between versions, the plan reads this.
        tensors = [SimpleNamespace(size=spec.page_size_bytes * pool_blocks)]
        cache = KVCacheConfig(pool_blocks, tensors, [KVCacheGroupSpec(["layer"], spec)])
        vllm_config.cache_config.num_gpu_blocks = pool_blocks
        block_size, hash_size = resolve_kv_cache_block_sizes(cache, vllm_config)
        self.scheduler = Scheduler(
            vllm_config,
            cache,
            StructuredOutputManager(vllm_config),
            block_size=block_size,
            hash_block_size=hash_size,
        )
        hash_of = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_of)
        self._hasher = get_request_block_hasher(hash_size, hash_of)
        [self.manager] = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        assert isinstance(self.manager, OasisManager)
        self.pool = self.manager.block_pool
        self.state = state_of(self.pool)
        self.draw, self.late = draw, late
        self.hbm = {}
        self.store = {}
        self.known, self.kept = {}, {}
        self.ended = {}
        self.weights = 0
        self.prefix_of = {}
        self.requests, self.found = {}, {}
        self.sparse_steps = self.late_writes = 0
        self._check_allocation()

    def _check_allocation(self):
        """What a request takes is what the manager said, and what was to stay free does."""
        manager, allocate = self.manager, self.scheduler.kv_cache_manager.allocate_slots
        count = manager.get_num_blocks_to_allocate
        asked = {}

        def counting(request_id, *args, **settings):
            needed = count(request_id, *args, **settings)
            kept = asked["kept"] if request_id in self.state.requests else 0
            asked["taken"] = needed - kept
            return needed

        keep = manager._kept_free

        def keeping(*args):
            asked["kept"] = keep(*args)
            return asked["kept"]

        def allocating(request, *args, **settings):
            free = self.pool.get_num_free_blocks()
            blocks = allocate(request, *args, **settings)
            if blocks is not None:
                assert free - self.pool.get_num_free_blocks() == asked["taken"], request.request_id
                self._check_admitted(request, settings)
            return blocks

        manager._kept_free = keeping
        manager.get_num_blocks_to_allocate = counting
        self.scheduler.kv_cache_manager.allocate_slots = allocating

    def _check_admitted(self, request, settings):
        """Tokens that a request reads no prefix of are none."""
        found = settings.get("num_new_computed_tokens", 0)
        found += settings.get("num_external_computed_tokens", 0)
        if request.skip_reading_prefix_cache:
            assert not found
        self.found[request.request_id] = max(found, self.found.get(request.request_id, 0))

    # What is asked of it.

    def add(self, name, prompt, new, reads=True, priority=0, resumable=False):
        sampling = SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, skip_reading_prefix_cache=not reads
        )
        request = Request(
            name,
            list(prompt),
            sampling,
            None,
            priority=priority,
            block_hasher=self._hasher,
            resumable=resumable,
        )
        if name not in self.scheduler.requests:
            self.requests[name] = request
        self.scheduler.add_request(request)

    def end_session(self, name):
        request = Request(name, [1], SamplingParams(max_tokens=1), None, resumable=False)
        self.scheduler.add_request(request)

    def abort(self, name):
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def preempt(self, name):
        request, scheduler = self.requests[name], self.scheduler
        scheduler.running.remove(request)
        scheduler._preempt_request(request, 0.0)
        scheduler.prev_step_scheduled_req_ids.discard(name)

    def preempt_all(self):
        """And what vLLM has cached is forgotten."""
        self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def new_weights(self):
        """What was computed until now is of no use any more."""
        self.weights += 1
        reset = self.scheduler.reset_prefix_cache
        assert reset(reset_running_requests=True, reset_connector=True)

    def forget_hbm(self):
        self.pool.evict_blocks({b.block_id for b in self.pool.blocks if not b.ref_cnt})

    def forget_store(self):
        """Of blocks without a user."""
        self.state.unpublish(set(self.state.store._kept))

    @property
    def running(self):
        return [request.request_id for request in self.scheduler.running]

    def phase(self, name):
        state = self.state.requests[name]
        if state.window_start:
            return "sparse"
        if state.hot:
            return "in transition"
        request = self.requests[name]
        return "decoding" if request.num_computed_tokens >= request.num_prompt_tokens else "prompt"

    # One step.

    def step(self):
        output = self.scheduler.schedule()
        self._begin(output.kv_connector_metadata)
        sampled = {}
        for name, count in output.num_scheduled_tokens.items():
            drafts = output.scheduled_spec_decode_tokens.get(name, [])
            sampled[name] = self._forward(self.requests[name], count, drafts)
        ack = self._acknowledge(list(sampled))
        names = list(sampled)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[sampled[name] for name in names],
                kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=ack),
            ),
        )
        for name in names:
            request = self.requests[name]
            if name in self.scheduler.requests and sampled[name] and self.drafts:
                request.spec_token_ids = self._drafts(request)
            self._prefixes(request, request.all_token_ids)
        self.check_found()

    def finish(self, most=3000):
        for _ in range(most):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
        assert not self.scheduler.has_unfinished_requests(), self.scheduler.requests
        # Workers hear of ends, and acknowledge what was late, with further steps.
        self.late = 0.0
        while self.state.held or self.ended:
            self.add("last", [1], 1)
            self.step()
        self.step()

    def assert_all_back(self):
        assert all(not block.ref_cnt for block in self.pool.blocks if not block.is_null)
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        state = self.state
        left = state.requests, state.admitted, state.may_go_sparse, state.held, state.returned
        assert not any(left)
        assert state.promised == 0
        assert state.store.free_blocks == state.store.capacity_blocks
        assert not self.kept

    @property
    def drafts(self):
        return self.scheduler.num_spec_tokens

    def _drafts(self, request):
        """Some right ones, then wrong ones."""
        tokens = request.all_token_ids
        right, drafts = self.draw.randint(0, self.drafts), list(tokens)
        most = self.drafts
        if request.resumable:
            # vLLM counts drafts as computed that it accepts past the end of a part, and takes the
            # next part's first tokens for these.
            most = max(0, min(most, request.max_tokens - request.num_output_tokens - 1))
        for index in range(self.draw.randint(0, most)):
            drafts.append((next_token(drafts) + (index >= right)) % VOCABULARY)
        return drafts[len(tokens) :]

    def _begin(self, message):
        """Take in the scheduler's news."""
        for name, keep in message.dropped.items():
            request = self.known.pop(name, None)
            if not keep:
                self.kept.pop(name, None)
            if request is not None:
                if keep and request.window_start is not None:
                    self.kept[name] = request.window_start
                if request.late:
                    self.ended.setdefault(name, []).append(request)
        for name, news in message.requests.items():
            request = self.known.setdefault(name, SimulatedRequest())
            request.store_blocks += news.store_blocks[: news.known]
            request.assigned += news.store_blocks[news.known :]
            request.slots |= bool(news.slots)
            if news.resume_start:
                assert self.kept.pop(name) == news.resume_start
                request.window_start = news.resume_start
            for stored, block in news.loads:
                self.hbm[block] = list(self.store[stored])

    def _forward(self, request, count, drafts):
        """Reads, writes and samples; returns the tokens."""
        name = request.request_id
        # One that never fills a block does not go through the store.
        known = self.known.get(name, SimulatedRequest())
        tokens = [*request.all_token_ids, *drafts]
        end = request.num_computed_tokens
        start = end - count
        table = self.manager.req_to_blocks[name]
        prefixes = self._prefixes(request, tokens)
        sparse = known.window_start is not None
        self.sparse_steps += sparse
        for index in range(start):
            block = index // SIZE
            if sparse and self.config.sink_blocks <= block < known.window_start:
                content = self.store[known.store_blocks[block]][index % SIZE]
            else:
                assert not table[block].is_null
                content = self.hbm[table[block].block_id][index % SIZE]
            assert content.prefix == prefixes[index], (name, index, "holds other tokens")
            assert sparse or content.exact, (name, index, "was computed sparsely")
        for index in range(start, end):
            block = table[index // SIZE]
            assert not block.is_null
            content = Content(prefixes[index], not sparse)
            self.hbm.setdefault(block.block_id, [None] * SIZE)[index % SIZE] = content
        sampled = []
        if end - len(drafts) >= request.num_tokens:
            fed = list(request.all_token_ids)
            for draft in [*drafts, None]:
                sampled.append(next_token(fed))
                fed.append(sampled[-1])
                if draft != sampled[-1]:
                    break
        self._after(known, table, start + count - len(drafts) + max(0, len(sampled) - 1), sampled)
        return sampled

    def _after(self, known, table, computed, sampled):
        """Close blocks, go sparse, move the window."""
        closable = len(known.store_blocks) + len(known.assigned)
        computed = min(computed, (closable + 1) * SIZE - 1)
        for block in range(len(known.store_blocks), computed // SIZE):
            stored = known.assigned.pop(0)
            known.store_blocks.append(stored)
            content = list(self.hbm[table[block].block_id])
            if self.draw.random() < self.late:
                known.late[block] = content
                self.late_writes += 1
            else:
                self.store[stored] = content
        start = max(0, computed // SIZE - self.config.window_blocks)
        past = computed > self.config.resolved_threshold_tokens
        if known.window_start is not None or (known.slots and past and sampled):
            self._arrive(known, start)
            known.window_start = start

    def _arrive(self, known, blocks=None):
        """Late writes of the first so many blocks."""
        for block in sorted(known.late):
            if blocks is None or block < blocks:
                self.store[known.store_blocks[block]] = known.late.pop(block)

    def _acknowledge(self, names):
        for late in [*self.known.values(), *[r for left in self.ended.values() for r in left]]:
            if self.draw.random() >= self.late:
                self._arrive(late)
        for name in list(self.ended):
            self.ended[name] = [request for request in self.ended[name] if request.late]
            if not self.ended[name]:
                del self.ended[name]
        names = [name for name in names if name in self.known]
        starts = {name: self.known[name].window_start for name in names}
        in_flight = {name for name, request in self.known.items() if request.late}
        return OasisAck(
            {name: start for name, start in starts.items() if start is not None},
            {name: self.known[name].stored for name in names},
            in_flight | self.ended.keys(),
        )

    def _prefixes(self, request, tokens):
        """What stands for each token and all before it; and what each block hash stands for."""
        prefixes, prefix = [], self.weights
        for token in tokens:
            prefix = hash((prefix, token))
            prefixes.append(prefix)
        for index, key in enumerate(request.block_hashes):
            self.prefix_of[bytes(key)] = prefixes[(index + 1) * SIZE - 1]
        return prefixes

    # What may be found by its content.

    def found_in_hbm(self):
        """Block hash -> content, of all that vLLM's prefix cache offers."""
        blocks = [b for b in self.pool.blocks if b.block_hash is not None]
        return {bytes(get_block_hash(b.block_hash)): self.hbm[b.block_id] for b in blocks}

    def found_in_store(self):
        return {bytes(key): self.store[b] for key, b in self.state.store._block_of.items()}

    def check_found(self):
        """All of it is what its hash stands for, and was computed from all before it."""
        for found in (self.found_in_hbm(), self.found_in_store()):
            for key, content in found.items():
                assert content[-1].prefix == self.prefix_of[key]
                assert all(place.exact for place in content)
