"""What kvloop stands on in vLLM: classes, and of each what kvloop overrides, calls, reads or builds.

`record_api` looks these up in a vLLM's sources; `test_vllm_api` checks that the connector uses nothing else.
"""

from dataclasses import dataclass

NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


@dataclass(frozen=True)
class Owner:
    """A class of vLLM's, as `module:Class`, and what of it kvloop overrides, calls, reads or builds.

    `bases` are looked into after it. `optional` is what not every version has. `all_public`: every public
    method is recorded, so that a new hook is noticed.
    """

    where: str
    uses: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    all_public: bool = False


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


OWNERS = (
    Owner(
        f"{_BASE}:KVConnectorBase_V1",
        _words("__init__ bind_kv_cache_manager build_connector_worker_meta reset_cache"),
        all_public=True,
    ),
    Owner(
        f"{NIXL}.connector:NixlPullConnector",
        _words("__init__ start_load_kv engine_id connector_scheduler connector_worker"),
        (f"{NIXL}.connector:NixlBaseConnector",),
        all_public=True,
    ),
    Owner(f"{_BASE}:KVConnectorRole", ("SCHEDULER", "WORKER")),
    Owner(f"{_BASE}:KVConnectorWorkerMetadata", ("aggregate",)),
    Owner(f"{_BASE}:KVConnectorTransferResults", _words("finished_recving failed_recving finished_sending")),
    Owner(
        f"{NIXL}.pull_scheduler:NixlPullConnectorScheduler",
        _words(
            """__init__ on_new_request get_num_new_matched_tokens update_state_after_alloc
            build_connector_meta update_connector_output request_finished set_xfer_handshake_metadata shutdown
            get_exchange_clipped_blocks has_pending_push_work block_size engine_id side_channel_host
            side_channel_port transfer_tp_size _is_hma_required"""
        ),
        (f"{NIXL}.base_scheduler:NixlBaseConnectorScheduler",),
        ("_registration_generation",),
    ),
    Owner(
        f"{NIXL}.pull_worker:NixlPullConnectorWorker",
        _words(
            """__init__ start_load_kv get_transfer_results shutdown _read_blocks_for_req nixl_wrapper
            _cleanup_remote_engine _engines_with_inflight_transfers _handle_failed_transfer
            _try_release_xfer_handle _pending_recv_notifs _recv_failures _recving_metadata _recving_transfers
            _remote_agents dst_num_blocks transfer_topo"""
        ),
        (f"{NIXL}.base_worker:NixlBaseConnectorWorker",),
        _words("unregister_kv_caches restore_kv_caches _remote_registration_generations"),
    ),
    Owner(
        f"{NIXL}.metadata:NixlConnectorMetadata",
        _words("__init__ add_new_req_to_recv reqs_to_recv reqs_to_send reqs_in_batch"),
    ),
    Owner(f"{NIXL}.metadata:ReqMeta", _words("local_block_ids remote awaiting_kvs")),
    Owner(
        f"{NIXL}.metadata:RemoteMeta", _words("block_ids engine_id"), optional=("registration_generation",)
    ),
    Owner(
        "vllm.distributed.kv_transfer.kv_connector.utils:TransferTopology",
        ("get_engine_info",),
    ),
    Owner(
        "vllm.distributed.kv_transfer.kv_connector.utils:EngineTransferInfo",
        ("remote_physical_blocks_per_logical",),
    ),
    Owner(
        "vllm.v1.core.block_pool:BlockPool",
        _words(
            """touch free_blocks unpin_blocks get_new_blocks get_num_free_blocks reset_prefix_cache blocks
            num_gpu_blocks free_block_queue"""
        ),
    ),
    Owner(
        "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue",
        _words("fake_free_list_head fake_free_list_tail remove append_n"),
    ),
    Owner(
        "vllm.v1.core.kv_cache_utils:KVCacheBlock",
        _words("block_id ref_cnt block_hash is_null prev_free_block next_free_block"),
    ),
    Owner(
        "vllm.v1.core.kv_cache_manager:KVCacheManager",
        _words("block_pool coordinator watermark_blocks allocate_slots reset_prefix_cache"),
    ),
    Owner(
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator",
        _words("get_num_blocks_to_allocate single_type_managers"),
    ),
    Owner("vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager", ("req_to_blocks",)),
    Owner("vllm.v1.core.sched.scheduler:Scheduler", ("deferred_frees",)),
    Owner("vllm.v1.engine.core:EngineCoreProc", ("input_queue",)),
    Owner("vllm.v1.engine:EngineCoreRequestType", ("WAKEUP",)),
    Owner("vllm.v1.core.kv_cache_manager:KVCacheBlocks", ("get_unhashed_block_ids_all_groups",)),
    Owner("vllm.v1.kv_cache_interface:KVCacheConfig", ("kv_cache_groups",)),
    Owner("vllm.v1.kv_cache_interface:KVCacheGroupSpec", ("layer_names", "kv_cache_spec")),
    Owner("vllm.v1.kv_cache_interface:KVCacheSpec", ("page_size_bytes",)),
    Owner(
        "vllm.v1.outputs:KVConnectorOutput",
        _words("finished_recving failed_recving kv_connector_worker_meta"),
    ),
    Owner(
        "vllm.v1.request:Request",
        _words(
            """request_id kv_transfer_params prompt_token_ids prompt_embeds all_token_ids num_prompt_tokens
            num_tokens num_computed_tokens status lora_request cache_salt mm_features pooling_params
            get_skip_reading_prefix_cache block_hashes"""
        ),
    ),
    Owner("vllm.v1.request:RequestStatus", _words("FINISHED_STOPPED FINISHED_LENGTH_CAPPED")),
    Owner("vllm.multimodal.inputs:MultiModalFeatureSpec", _words("modality identifier mm_hash mm_position")),
    Owner("vllm.multimodal.inputs:PlaceholderRange", ("offset", "length")),
    Owner("vllm.lora.request:LoRARequest", _words("lora_name lora_path lora_int_id load_inplace")),
    Owner("vllm.config.lora:LoRAConfig", _words("lora_dtype target_modules enable_tower_connector_lora")),
    Owner(
        "vllm.config.vllm:VllmConfig",
        _words("model_config cache_config parallel_config kv_transfer_config lora_config"),
    ),
    Owner(
        "vllm.config.model:ModelConfig",
        _words("model revision dtype quantization max_model_len hf_config multimodal_config"),
    ),
    Owner("vllm.config.multimodal:MultiModalConfig", ("mm_processor_cache_gb",)),
    Owner("vllm.config.cache:CacheConfig", _words("cache_dtype block_size enable_prefix_caching")),
    Owner(
        "vllm.config.parallel:ParallelConfig",
        _words(
            """data_parallel_index pipeline_parallel_size decode_context_parallel_size
            prefill_context_parallel_size data_parallel_rank data_parallel_size_local"""
        ),
    ),
    Owner(
        "vllm.config.kv_transfer:KVTransferConfig",
        ("kv_connector", "kv_connector_extra_config", "kv_load_failure_policy"),
    ),
    Owner(
        "vllm.plugins.endpoint_plugins.interface:EndpointPlugin",
        _words("name required_tasks attach_router init_state"),
    ),
    Owner("vllm.engine.protocol:EngineClient", ("generate", "vllm_config")),
    Owner("vllm.outputs:RequestOutput", ("kv_transfer_params",)),
    Owner(
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionStreamResponse",
        optional=("kv_transfer_params",),
    ),
    Owner(
        "vllm.entrypoints.openai.completion.protocol:CompletionStreamResponse",
        optional=("kv_transfer_params",),
    ),
)
CONSTANTS = (
    "vllm.plugins:DEFAULT_PLUGINS_GROUP",
    "vllm.plugins:ENDPOINT_PLUGINS_GROUP",
    "vllm.envs:VLLM_NIXL_SIDE_CHANNEL_HOST",
    f"{NIXL}.metadata:NIXL_CONNECTOR_VERSION",
)
_V1 = "vllm.v1"
CALLS = {
    f"{_V1}.core.kv_cache_manager:KVCacheManager.allocate_slots": {
        "get_num_blocks_to_allocate",
        "get_num_free_blocks",
    },
    f"{_V1}.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.allocate_new_blocks": {
        "get_new_blocks"
    },
    f"{_V1}.core.block_pool:BlockPool.get_new_blocks": {"popleft_n"},
    f"{_V1}.core.sched.scheduler:Scheduler.has_requests": {"has_pending_push_work"},
    f"{_V1}.engine.core:EngineCoreProc.has_work": {"has_requests"},
    f"{_V1}.engine.core:EngineCoreProc._process_input_queue": {"has_work", "_handle_client_request"},
}
"""Methods of vLLM's, and what each has to call for kvloop's hooks to be reached."""
