"""The architectures that are served: printed by `tokenmill models`. Imports neither torch nor transformers."""

import textwrap
from collections.abc import Iterable
from os.path import commonprefix

from engine.errors import UnsupportedModel
from engine.models.registry import ARCHITECTURES


def _ending(end: str, names: str) -> list[str]:
    """Return the names, each followed by `end`."""
    return [name + end for name in names.split()]


#: tests/engine/test_transformers_models.py compares each with transformers, token by token. Those that are
#: native by now are served natively unless model_path says otherwise.
TRANSFORMERS = (
    *("BertGenerationDecoder", "BertLMHeadModel", "CTRLLMHeadModel", "GPT2LMHeadModel"),
    *_ending(
        "ForCausalLM",
        """
        AXK1 AXK2 Afmoe Apertus Arcee AriaText BailingHybrid Bamba Bart Beam BioGpt BitNet Blenderbot
        BlenderbotSmall Bloom Cohere Cohere2 Cohere2Moe CohereCompass Cwm DeepseekV2 DeepseekV3 DeepseekV32
        DiffLlama Dots1 Dots3Note Electra Ernie Ernie4_5 Ernie4_5_Moe Exaone4 ExaoneMoe Falcon FalconH1
        FalconMamba FlexOlmo Flint GPTBigCode GPTNeoX Gemma Gemma2 Gemma3 Gemma3n Gemma4 Gemma4Unified Glm Glm4
        Glm4Moe Glm4MoeLite GlmMoeDsa GptOss Granite GraniteMoe GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared
        GraniteSWA HYV3 HYV4 Helium HrmText HunYuanDenseV1 HunYuanMoEV1 HyperCLOVAX Jais2 Jamba JetMoe KimiLinear
        Kolibri1 Laguna Lfm2 Lfm2Moe Lfm3 Llama Llama4 LongcatFlash MBart Mamba Mamba2 Marian Mellum MiMoV2Flash
        MiniCPM3 MiniMax MiniMaxM2 MiniMaxM3VL Ministral Ministral3 Mistral Mixtral ModernBertDecoder Mpt NanoChat
        Nemotron NemotronH OPT Olmo Olmo2 Olmo3 OlmoHybrid Olmoe PLBart Pegasus Persimmon Phi Phi3 Phimoe Qwen2
        Qwen2Moe Qwen3 Qwen3Moe Qwen3Next Qwen3_5 Qwen3_5Moe RoCBert SeedOss SmolLM3 SolarOpen StableLm Starcoder2
        VaultGemma Whisper Youtu Zamba Zamba2
        """,
    ),
)

#: Asked for text alone: `python -m ops.models` compares each with transformers. Some are native.
WITH_IMAGES = (
    *(
        "EvollaForProteinText2Text",
        "FuyuForCausalLM",
        "Mistral4ForCausalLM",
        "Phi4MultimodalForCausalLM",
    ),
    *_ending(
        "ForConditionalGeneration",
        """
        Aria AyaVision Chameleon Cohere2Vision CohereCompass Cosmos3Edge Cosmos3Omni DeepseekVL DeepseekVLHybrid
        Dots3Note Emu3 Exaone4_5_ FunAsrNano Gemma3 Gemma4 Gemma4Unified Glm46V Glm4v Glm4vMoe Glm5Next GlmAsr
        GlmOcr GotOcr2 GraniteDocling GraniteSpeech GraniteSpeechPlus HunYuanVL HyperCLOVAXVisionV2 Idefics2
        Idefics3 InternVL Janus Kimi_K25 Lfm2Vl Lfm3Vl LightOnOcr Llama4 Llava LlavaNext LlavaNextVideo
        LlavaOnevision MiniCPMOcr MiniCPMV4_6 MiniCPMV4_7 MiniMaxM3Sparse Mistral3 MistralLarge4 Mllama Molmo2
        MossTranscribeDiarize MuseGlimmer Ovis2 PaddleOCRVL QianfanOCR Qwen2Audio Qwen2VL Qwen2_5OmniThinker
        Qwen2_5_VL Qwen3ASR Qwen3OmniMoeThinker Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe SmolVLM Step3p7 UnlimitedOcr
        VibeVoiceAsr VideoLlama3 VideoLlava VipLlava Voxtral
        """,
    ),
)

#: Refused architectures by the reason, each with the nearest served one.
REFUSED = {
    "a state that transformers keeps outside its cache": {
        "RecurrentGemmaForCausalLM": "Gemma2ForCausalLM",
        "RwkvForCausalLM": "Mamba2ForCausalLM",
    },
    "adapters of a language, which no prompt names": {"XmodForCausalLM": "BertLMHeadModel"},
    "an attention of its own, which no other can take the place of": {
        "CodeGenForCausalLM": "Starcoder2ForCausalLM",
        "GPTJForCausalLM": "GPTNeoXForCausalLM",
        "GPTNeoForCausalLM": "GPTNeoXForCausalLM",
        "OpenAIGPTLMHeadModel": "GPT2LMHeadModel",
        "XGLMForCausalLM": "OPTForCausalLM",
    },
    "attention to tokens that an index, a bias or a mask of its own chooses": {
        "DogeForCausalLM": "SmolLM3ForCausalLM",
        "InklingForCausalLM": "Qwen3MoeForCausalLM",
        "Qwen4ExpForCausalLM": "Qwen3_5ForCausalLM",
    },
}

RELATED_CHARS = 3  # names that begin alike for so long are of one family
WIDTH = 110


def nearest(architecture: str) -> str:
    """Name the served architecture that is most like this one, as the end of a sentence."""
    for instead in REFUSED.values():
        if architecture in instead:
            return f"the nearest that is served: {instead[architecture]}"
    alternatives = sorted(served_architectures() - {architecture})
    related = max(alternatives, key=lambda name: _alike(name, architecture))
    if _alike(related, architecture) < RELATED_CHARS:
        return "`tokenmill models` lists what is served"
    return f"the nearest that is served: {related}; `tokenmill models` lists all"


def refuse_known(architecture: str) -> None:
    """Raise UnsupportedModel if this one was tried and is refused."""
    for reason, nearest_ones in REFUSED.items():
        if architecture in nearest_ones:
            raise UnsupportedModel(
                f"{architecture} has {reason}; the nearest that is served: {nearest_ones[architecture]} "
                "(model_path='transformers' tries it all the same)"
            )


def served_architectures() -> frozenset[str]:
    """Return all architectures that were compared with transformers' own."""
    return frozenset(ARCHITECTURES).union(TRANSFORMERS)


def model_table() -> str:
    """List in lines the architectures served natively, served through transformers, and refused, with reasons."""
    through = served_architectures() - frozenset(ARCHITECTURES)
    lines = ["Natively:", *_wrapped(ARCHITECTURES), ""]
    lines += [
        "Through transformers (others are tried, and probed when the engine starts):",
        *_wrapped(through),
    ]
    lines += [
        "",
        "The text of models that read images or sound too, and pictures where the start finds them exact:",
    ]
    lines += _wrapped(WITH_IMAGES)
    lines += ["", "Encoders and heads for classification: `tokenmill models FOLDER` tells of one."]
    lines += ["", "Refused, each with the nearest that is served:"]
    for reason, nearest_ones in REFUSED.items():
        pairs = (f"{name} ({instead})" for name, instead in nearest_ones.items())
        lines += [f"  {reason}", *_wrapped(pairs, indent=4)]
    return "\n".join(lines)


def _wrapped(names: Iterable[str], indent: int = 2) -> list[str]:
    """Write the names in alphabetical order, in lines broken after commas."""
    # textwrap breaks lines at spaces, and a name may hold some.
    text = ", ".join(name.replace(" ", "\0") for name in sorted(names, key=str.lower))
    space = " " * indent
    lines = textwrap.wrap(
        text, WIDTH, initial_indent=space, subsequent_indent=space, break_on_hyphens=False
    )
    return [line.replace("\0", " ") for line in lines]


def _alike(one: str, other: str) -> int:
    """Count the letters with which both begin."""
    return len(commonprefix([one, other]))  # noqa: RUF071 - letters are what is meant
