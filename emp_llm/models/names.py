"""The names by which layers are known, of all families. Imports neither torch nor transformers.

A leaf is the last component of a layer's name. Tables of fields of config.json lie with what reads
the fields.
"""

import re

# Submodules that mix tokens. The other linear layers of a block are its MLP.
MIXES_TOKENS = re.compile(
    r"attn|attention|mixer|mamba|(?<![a-z])ssm|deltanet|recurrent|rwkv", re.IGNORECASE
)
IS_MLP = re.compile(r"(mlp|feedforward)$", re.IGNORECASE)  # a class of which this is the end

# Leaves of attention.
QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")
JOINED = ("qkv_proj", "c_attn")  # all queries, then all keys, then all values
JOINED_BY_GROUP = ("query_key_value",)  # for each group of heads its queries, its key and its value
ATTENTION_OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense", "wo")
HEAD_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")

# Leaves of MLPs and mixtures of experts.
GATE_AND_UP = ("gate_up_proj",)  # all gates, then all features
ROUTERS = frozenset(("gate", "router", "shared_expert_gate"))
OF_AN_EXPERT = re.compile(r"experts?\.\d+\.")

# A component of the name of layers that predict a second token.
SECOND_TOKEN = re.compile(r"(^|\.)(mtp|nextn)(_\w+)?\.", re.IGNORECASE)

# Of a model in an adapter of PEFT, and of one in a wrapper of torch.
IN_ADAPTER = re.compile(
    r"^base_model\.model\.|(^|\.)(base_layer|lora_[AB]|original_module|modules_to_save)(\.|$)"
)
IN_WRAPPER = re.compile(
    r"^module\.|(^|\.)(_orig_mod|_(fsdp|checkpoint)_wrapped_module|_forward_module)\."
)

# Leaves that write to the residual stream.

# Outside of blocks, but for relative position biases.
EMBEDDINGS = re.compile(r"(^|_)(bias|embed|embeddings?)$|^embed_|^w[tp]e$", re.IGNORECASE)
HEADS = re.compile(r"(^|[._])(lm_?heads?|unembed|embed_out)([._]|$)", re.IGNORECASE)
HEAD_LEAVES = ("lm_head", "embed_out", "output")

# Parts of names that tell an encoder of images or sound, and what connects it with the decoder.
VISION = re.compile(
    r"(^|_)(vision|visual|image|images|video|vit|vqmodel|vqvae|pixel)(_|$)", re.IGNORECASE
)
AUDIO = re.compile(r"(^|_)(audio|speech|sound|acoustic)(_|$)", re.IGNORECASE)
CONNECTS = re.compile(r"projector|connector|aligner|multi_modal", re.IGNORECASE)
HALF = re.compile(r"(?:^|\.)(encoder|decoder)(?=\.|$)")

# Llama's conventions, which most published models follow in every name.
LLAMA_BLOCKS = "model.layers"
LLAMA_EMBEDDING = "model.embed_tokens"
LLAMA_NORM = "model.norm"
LLAMA_HEAD = "lm_head"
LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
LLAMA_MORE_NORMS = (
    "self_attn.q_norm",
    "self_attn.k_norm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
# Apart or joined, in the order of the modules.
LLAMA_ATTENTION = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    ("self_attn.o_proj", "self_attn.qkv_proj"),
)
LLAMA_MLP = (
    ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    ("mlp.gate_up_proj", "mlp.down_proj"),
)
