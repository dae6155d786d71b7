"""The architectures that are served: printed by `tokenmill models`. Imports neither torch nor transformers."""

import textwrap
from collections.abc import Iterable
from os.path import commonprefix

from engine.errors import UnsupportedModel
from engine.models.registry import ARCHITECTURES

#: tests/engine/test_transformers_models.py compares each with transformers, token by token. Those that are
#: native by now are served natively unless model_path says otherwise.
TRANSFORMERS = tuple(
    """
    AXK1ForCausalLM AXK2ForCausalLM AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM AriaTextForCausalLM
    BailingHybridForCausalLM BambaForCausalLM BartForCausalLM BeamForCausalLM BertGenerationDecoder
    BertLMHeadModel BioGptForCausalLM BitNetForCausalLM BlenderbotForCausalLM BlenderbotSmallForCausalLM
    BloomForCausalLM CTRLLMHeadModel Cohere2ForCausalLM Cohere2MoeForCausalLM CohereCompassForCausalLM
    CohereForCausalLM CwmForCausalLM DeepseekV2ForCausalLM DeepseekV32ForCausalLM DeepseekV3ForCausalLM
    DiffLlamaForCausalLM Dots1ForCausalLM Dots3NoteForCausalLM ElectraForCausalLM Ernie4_5ForCausalLM
    Ernie4_5_MoeForCausalLM ErnieForCausalLM Exaone4ForCausalLM ExaoneMoeForCausalLM FalconForCausalLM
    FalconH1ForCausalLM FalconMambaForCausalLM FlexOlmoForCausalLM FlintForCausalLM GPT2LMHeadModel
    GPTBigCodeForCausalLM GPTNeoXForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Gemma3nForCausalLM
    Gemma4ForCausalLM Gemma4UnifiedForCausalLM GemmaForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM
    Glm4MoeLiteForCausalLM GlmForCausalLM GlmMoeDsaForCausalLM GptOssForCausalLM GraniteForCausalLM
    GraniteMoeForCausalLM GraniteMoeHybridForCausalLM GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM
    GraniteSWAForCausalLM HYV3ForCausalLM HYV4ForCausalLM HeliumForCausalLM HrmTextForCausalLM
    HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM HyperCLOVAXForCausalLM Jais2ForCausalLM
    JambaForCausalLM JetMoeForCausalLM KimiLinearForCausalLM Kolibri1ForCausalLM LagunaForCausalLM
    Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm3ForCausalLM Llama4ForCausalLM LlamaForCausalLM
    LongcatFlashForCausalLM MBartForCausalLM Mamba2ForCausalLM MambaForCausalLM MarianForCausalLM
    MellumForCausalLM MiMoV2FlashForCausalLM MiniCPM3ForCausalLM MiniMaxForCausalLM MiniMaxM2ForCausalLM
    MiniMaxM3VLForCausalLM Ministral3ForCausalLM MinistralForCausalLM MistralForCausalLM MixtralForCausalLM
    ModernBertDecoderForCausalLM MptForCausalLM NanoChatForCausalLM NemotronForCausalLM NemotronHForCausalLM
    OPTForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoForCausalLM OlmoHybridForCausalLM OlmoeForCausalLM
    PLBartForCausalLM PegasusForCausalLM PersimmonForCausalLM Phi3ForCausalLM PhiForCausalLM
    PhimoeForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM
    Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM RoCBertForCausalLM SeedOssForCausalLM
    SmolLM3ForCausalLM SolarOpenForCausalLM StableLmForCausalLM Starcoder2ForCausalLM VaultGemmaForCausalLM
    WhisperForCausalLM YoutuForCausalLM Zamba2ForCausalLM ZambaForCausalLM
    """.split()  # noqa: SIM905  # as a list it would fill a page
)


#: Asked for text alone: `python -m ops.models` compares each with transformers. Some are native.
WITH_IMAGES = tuple(
    """
    AriaForConditionalGeneration AyaVisionForConditionalGeneration ChameleonForConditionalGeneration
    Cohere2VisionForConditionalGeneration CohereCompassForConditionalGeneration
    Cosmos3EdgeForConditionalGeneration Cosmos3OmniForConditionalGeneration
    DeepseekVLForConditionalGeneration DeepseekVLHybridForConditionalGeneration
    Dots3NoteForConditionalGeneration Emu3ForConditionalGeneration EvollaForProteinText2Text
    Exaone4_5_ForConditionalGeneration FunAsrNanoForConditionalGeneration FuyuForCausalLM
    Gemma3ForConditionalGeneration Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration
    Glm46VForConditionalGeneration Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration
    Glm5NextForConditionalGeneration GlmAsrForConditionalGeneration GlmOcrForConditionalGeneration
    GotOcr2ForConditionalGeneration GraniteDoclingForConditionalGeneration
    GraniteSpeechForConditionalGeneration GraniteSpeechPlusForConditionalGeneration
    HunYuanVLForConditionalGeneration HyperCLOVAXVisionV2ForConditionalGeneration
    Idefics2ForConditionalGeneration Idefics3ForConditionalGeneration InternVLForConditionalGeneration
    JanusForConditionalGeneration Kimi_K25ForConditionalGeneration Lfm2VlForConditionalGeneration
    Lfm3VlForConditionalGeneration LightOnOcrForConditionalGeneration Llama4ForConditionalGeneration
    LlavaForConditionalGeneration LlavaNextForConditionalGeneration LlavaNextVideoForConditionalGeneration
    LlavaOnevisionForConditionalGeneration MiniCPMOcrForConditionalGeneration
    MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration
    MiniMaxM3SparseForConditionalGeneration Mistral3ForConditionalGeneration Mistral4ForCausalLM
    MistralLarge4ForConditionalGeneration MllamaForConditionalGeneration Molmo2ForConditionalGeneration
    MossTranscribeDiarizeForConditionalGeneration MuseGlimmerForConditionalGeneration
    Ovis2ForConditionalGeneration PaddleOCRVLForConditionalGeneration Phi4MultimodalForCausalLM
    QianfanOCRForConditionalGeneration Qwen2AudioForConditionalGeneration Qwen2VLForConditionalGeneration
    Qwen2_5OmniThinkerForConditionalGeneration Qwen2_5_VLForConditionalGeneration
    Qwen3ASRForConditionalGeneration Qwen3OmniMoeThinkerForConditionalGeneration
    Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration Qwen3_5ForConditionalGeneration
    Qwen3_5MoeForConditionalGeneration SmolVLMForConditionalGeneration Step3p7ForConditionalGeneration
    UnlimitedOcrForConditionalGeneration VibeVoiceAsrForConditionalGeneration
    VideoLlama3ForConditionalGeneration VideoLlavaForConditionalGeneration VipLlavaForConditionalGeneration
    VoxtralForConditionalGeneration
    """.split()  # noqa: SIM905
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
    others = sorted(served_architectures() - {architecture})
    related = max(others, key=lambda name: _alike(name, architecture))
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
    lines += ["Through transformers (others are tried, and probed when the engine starts):", *_wrapped(through)]
    lines += ["", "The text of models that read images or sound too, and pictures where the start finds them exact:"]
    lines += _wrapped(WITH_IMAGES)
    lines += ["", "Encoders and heads for classification: `tokenmill models FOLDER` tells of one."]
    lines += ["", "Refused, each with the nearest that is served:"]
    for reason, nearest_ones in REFUSED.items():
        pairs = (f"{name} ({instead})" for name, instead in nearest_ones.items())
        lines += [f"  {reason}", *_wrapped(pairs, indent=4)]
    return "\n".join(lines)


def _wrapped(names: Iterable[str], indent: int = 2) -> list[str]:
    """Write the names in alphabetical order, in lines broken after commas."""
    text = ", ".join(name.replace(" ", "\0") for name in sorted(names, key=str.lower))
    space = " " * indent
    lines = textwrap.wrap(text, WIDTH, initial_indent=space, subsequent_indent=space, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def _alike(one: str, other: str) -> int:
    """Count the letters with which both begin."""
    return len(commonprefix([one, other]))  # noqa: RUF071 - letters are what is meant
