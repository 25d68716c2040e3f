"""Models that people train most, by the names that rows use: each has its published size, or is refused."""

from __future__ import annotations

import pytest

from orchestrator.memory.foreign.architectures import Architecture
from orchestrator.memory.foreign.public_models import known
from orchestrator.memory.foreign.published import described_row
from orchestrator.specs.errors import SpecError

# Parameters in millions, as the models' own pages or papers count them, and names that mean them.
PUBLISHED = """\
6738 huggyllama/llama-7b | LLaMA-7B | llama 7b | Llama-1-7B | decapoda-research/llama-7b-hf | LLaMA 1 7B
13016 huggyllama/llama-13b | LLaMA 13B
32529 huggyllama/llama-30b | llama-33b | LLaMA-32.5B
65286 huggyllama/llama-65b | LLaMA 65B
6738 Llama-2-7b-hf | llama2 7B | meta-llama/Llama-2-7b | meta-llama/Llama-2-7b-chat-hf | Llama2-7B
6738 llama-2 7b | LLaMA2 (7B) | llama2-7b-hf | NousResearch/Llama-2-7b-hf | Llama-v2-7b | LLaMA-2-7B base
13016 Llama-2-13b-hf | llama2-13b | meta-llama/Llama-2-13b-chat-hf | LLaMA2 13B
68977 Llama-2-70b-hf | llama2-70b | meta-llama/Llama-2-70b-chat | LLaMA-2 70B
8030 meta-llama/Meta-Llama-3-8B | llama3-8b | Llama 3 8B | Meta-Llama-3-8B-Instruct | Llama-3 8B Instruct
8030 llama-3-8b | unsloth/llama-3-8b-bnb-4bit
70554 meta-llama/Meta-Llama-3-70B-Instruct | llama3 70b | Llama-3-70B
8030 meta-llama/Llama-3.1-8B | Llama3.1-8B | llama-3.1 8b instruct | Meta-Llama-3.1-8B-Instruct
8030 unsloth/Meta-Llama-3.1-8B | llama31-8b | Llama-3_1-8B | NousResearch/Hermes-3-Llama-3.1-8B
8030 meta-llama/Llama-Guard-3-8B
70554 Llama-3.1-70B-Instruct | llama3.1 70B | nvidia/Llama-3.1-Nemotron-70B-Instruct-HF
405853 meta-llama/Llama-3.1-405B | llama3.1-405b | Llama 3.1 405B Instruct | Llama-3 405B
1236 meta-llama/Llama-3.2-1B | llama3.2-1b | Llama 3.2 1B Instruct | unsloth/Llama-3.2-1B-Instruct | llama32-1b
3213 meta-llama/Llama-3.2-3B-Instruct | Llama3.2 3B | llama-3_2-3b
70554 meta-llama/Llama-3.3-70B-Instruct | Llama3.3-70B | llama 3.3 70b
7242 mistralai/Mistral-7B-v0.1 | Mistral 7B | mistral-7b | Mistral-7B-Instruct-v0.2 | mistral7b
7242 HuggingFaceH4/zephyr-7b-beta | openchat/openchat-3.5-0106 | berkeley-nest/Starling-LM-7B-alpha
7242 Intel/neural-chat-7b-v3-1 | teknium/OpenHermes-2.5-Mistral-7B
7248 mistralai/Mistral-7B-v0.3 | Mistral-7B-Instruct-v0.3 | mistralai/Mathstral-7B-v0.1
46703 mistralai/Mixtral-8x7B-v0.1 | Mixtral 8x7B | Mixtral-8x7B-Instruct-v0.1
140630 mistralai/Mixtral-8x22B-v0.1 | mixtral 8x22b
12248 mistralai/Mistral-Nemo-Base-2407 | Mistral-Nemo-Instruct-2407 | Mistral Nemo 12B | mistral-nemo-12b
23572 mistralai/Mistral-Small-24B-Instruct-2501 | Mistral-Small-24B-Base-2501
23572 mistralai/Mistral-Small-3.1-24B-Base-2503 | Mistral Small 3 24B
22247 mistralai/Mistral-Small-Instruct-2409 | Mistral-Small-22B | mistralai/Codestral-22B-v0.1
8020 mistralai/Ministral-8B-Instruct-2410
122610 mistralai/Mistral-Large-Instruct-2407 | Mistral Large 123B | mistralai/Mistral-Large-Instruct-2411
1837 Qwen/Qwen-1_8B | qwen-1.8b-chat | Qwen-1.8B
7721 Qwen/Qwen-7B | qwen-7b-chat | Qwen 7B
14167 Qwen/Qwen-14B-Chat | Qwen-14B
72288 Qwen/Qwen-72B | qwen-72b-chat
464 Qwen/Qwen1.5-0.5B | qwen1half-0_5b | Qwen1.5 0.5B Chat
1837 Qwen/Qwen1.5-1.8B
3950 Qwen/Qwen1.5-4B | qwen1.5-4b-chat
7721 Qwen/Qwen1.5-7B-Chat | Qwen1.5 7B
14167 Qwen/Qwen1.5-14B
32512 Qwen/Qwen1.5-32B
72288 Qwen/Qwen1.5-72B
111210 Qwen/Qwen1.5-110B
494 Qwen/Qwen2-0.5B | Qwen/Qwen2.5-0.5B-Instruct | qwen2.5 0.5b | Qwen/Qwen2.5-Coder-0.5B
1544 Qwen/Qwen2-1.5B | Qwen2.5-1.5B | Qwen/Qwen2.5-Math-1.5B | Qwen/Qwen2.5-Coder-1.5B-Instruct | qwen25-1.5b
3086 Qwen/Qwen2.5-3B | Qwen2.5 3B Instruct | Qwen/Qwen2.5-Coder-3B
7616 Qwen/Qwen2-7B | Qwen/Qwen2.5-7B-Instruct | qwen2.5-7b | Qwen 2.5 7B | Qwen2_5-7B | qwen2_5-7b-instruct
7616 Qwen/Qwen2.5-Math-7B | Qwen/Qwen2.5-Coder-7B | Qwen/Qwen2.5-7B-Instruct-1M
14770 Qwen/Qwen2.5-14B-Instruct | Qwen2.5-Coder-14B | deepseek-ai/DeepSeek-R1-Distill-Qwen-14B
32764 Qwen/Qwen2.5-32B-Instruct | Qwen2.5-Coder-32B-Instruct | Qwen/QwQ-32B | Qwen/QwQ-32B-Preview
32764 deepseek-ai/DeepSeek-R1-Distill-Qwen-32B
72706 Qwen/Qwen2-72B | Qwen/Qwen2.5-72B-Instruct | Qwen/Qwen2.5-Math-72B
596 Qwen/Qwen3-0.6B | Qwen3 0.6B | Qwen/Qwen3-0.6B-Base
1721 Qwen/Qwen3-1.7B | qwen3-1.7b
4022 Qwen/Qwen3-4B | Qwen/Qwen3-4B-Instruct-2507 | Qwen/Qwen3-4B-Thinking-2507
4022 unsloth/Qwen3-4B-unsloth-bnb-4bit
8191 Qwen/Qwen3-8B | Qwen3 8B Base | deepseek-ai/DeepSeek-R1-0528-Qwen3-8B
14768 Qwen/Qwen3-14B | qwen3-14b-base
32762 Qwen/Qwen3-32B | Qwen3 32B
30532 Qwen/Qwen3-30B-A3B | Qwen3-30B-A3B-Instruct-2507 | Qwen3-Coder-30B-A3B-Instruct
235094 Qwen/Qwen3-235B-A22B | Qwen3 235B A22B
57409 Qwen/Qwen2-57B-A14B
14316 Qwen/Qwen1.5-MoE-A2.7B
2506 google/gemma-2b | gemma 2b it | gemma-1.1-2b-it
8538 google/gemma-7b | gemma-7b-it | google/gemma-1.1-7b-it | google/codegemma-7b
2614 google/gemma-2-2b | gemma2-2b-it | Gemma 2 2B
9242 google/gemma-2-9b-it | gemma2 9b | Gemma-2-9B
27227 google/gemma-2-27b | gemma2-27b
268 google/gemma-3-270m | gemma3-270m
1000 google/gemma-3-1b-it | gemma3-1b | Gemma 3 1B | google/gemma-3-1b-pt
3880 google/gemma-3-4b-it | Gemma 3 4B | gemma3-4b
11766 google/gemma-3-12b-it | gemma3 12b
27009 google/gemma-3-27b-pt | gemma-3-27b-it
1418 microsoft/phi-1 | microsoft/phi-1_5 | phi-1.5 | phi1.5
2780 microsoft/phi-2 | phi2 | Phi-2 2.7B | phi-2 (2.7B)
3821 microsoft/Phi-3-mini-4k-instruct | Phi-3-mini | phi3-mini-128k | microsoft/Phi-3.5-mini-instruct
3821 Phi-3 mini 3.8B | microsoft/Phi-3-mini-128k-instruct
13960 microsoft/Phi-3-medium-4k-instruct | phi-3-medium-14b
41873 microsoft/Phi-3.5-MoE-instruct
14660 microsoft/phi-4 | Phi 4 | phi-4-14b | microsoft/Phi-4-reasoning | unsloth/phi-4
3836 microsoft/Phi-4-mini-instruct | Phi-4-mini | microsoft/Phi-4-mini-reasoning
6922 tiiuae/falcon-7b | Falcon 7B | falcon-7b-instruct
41303 tiiuae/falcon-40b | falcon40b
179522 tiiuae/falcon-180B
1312 tiiuae/falcon-rw-1b
11104 tiiuae/falcon-11B
1669 tiiuae/Falcon3-1B-Base
3228 tiiuae/Falcon3-3B-Base
7456 tiiuae/Falcon3-7B-Instruct
10306 tiiuae/Falcon3-10B-Base
6649 mosaicml/mpt-7b | MPT-7B | mpt 7b instruct | mosaicml/mpt-7b-chat | mosaicml/mpt-7b-storywriter
29957 mosaicml/mpt-30b | mpt30b
14.07 EleutherAI/pythia-14m
30.49 EleutherAI/pythia-31m
70.4 EleutherAI/pythia-70m | EleutherAI/pythia-70m-deduped
162.3 EleutherAI/pythia-160m | pythia-160m-deduped
405.3 EleutherAI/pythia-410m
1011.8 EleutherAI/pythia-1b | Pythia 1B
1414.6 EleutherAI/pythia-1.4b-deduped | pythia 1.4B
2775.2 EleutherAI/pythia-2.8b
6857.3 EleutherAI/pythia-6.9b
11846 EleutherAI/pythia-12b | Pythia-12B deduped
81.9 distilgpt2 | distilbert/distilgpt2
124.4 gpt2 | GPT-2 | openai-community/gpt2 | GPT-2 small | gpt2-small | GPT2 124M | GPT-2 (124M)
124.4 microsoft/DialoGPT-small
354.8 gpt2-medium | GPT-2 Medium | openai-community/gpt2-medium | gpt2 355M | microsoft/DialoGPT-medium
774.0 gpt2-large | GPT-2 Large | GPT2-774M | microsoft/DialoGPT-large
1557.6 gpt2-xl | GPT-2 XL | GPT2-1.5B | GPT-2 1.5B | openai-community/gpt2-xl
125.2 EleutherAI/gpt-neo-125m | GPT-Neo 125M
1315.6 EleutherAI/gpt-neo-1.3B | gpt-neo 1.3b | GPTNeo-1.3B
2651.3 EleutherAI/gpt-neo-2.7B
6050.9 EleutherAI/gpt-j-6b | GPT-J | gptj-6b | GPT-J-6B | EleutherAI/gpt-j-6B | gpt-j 6B
20554 EleutherAI/gpt-neox-20b | GPT-NeoX-20B | gptneox-20b | GPT-NeoX 20B
125.2 facebook/opt-125m | OPT-125M
1315.8 facebook/opt-1.3b | OPT 1.3B
2651.6 facebook/opt-2.7b
6658 facebook/opt-6.7b | OPT-6.7B | opt6.7b
12853 facebook/opt-13b | OPT 13B
29974 facebook/opt-30b | OPT-30B
65718 facebook/opt-66b
175000 OPT-175B
559.2 bigscience/bloom-560m | bigscience/bloomz-560m | BLOOM 560M
1065.3 bigscience/bloom-1b1 | bloomz-1b1 | bloom-1.1b
1722.4 bigscience/bloom-1b7 | bloomz-1b7
3002.6 bigscience/bloom-3b | bloomz-3b | BLOOM-3B
7069 bigscience/bloom-7b1 | bloomz-7b1 | BLOOM 7.1B | bloomz-7b1-mt
176247 bigscience/bloom | BLOOM-176B | bloomz | BLOOM 176B
3638 stabilityai/stablelm-base-alpha-3b | stablelm-tuned-alpha-3b
7869 stabilityai/stablelm-tuned-alpha-7b
2795 stabilityai/stablelm-3b-4e1t | stabilityai/stablelm-zephyr-3b | stabilityai/stable-code-3b
1645 stabilityai/stablelm-2-1_6b | stabilityai/stablelm-2-zephyr-1_6b | StableLM 2 1.6B
12143 stabilityai/stablelm-2-12b
134.5 HuggingFaceTB/SmolLM-135M | HuggingFaceTB/SmolLM2-135M-Instruct | SmolLM2 135M
361.8 HuggingFaceTB/SmolLM-360M | SmolLM2-360M
1711 HuggingFaceTB/SmolLM-1.7B | SmolLM2-1.7B-Instruct
3075 HuggingFaceTB/SmolLM3-3B
1100 TinyLlama/TinyLlama-1.1B-Chat-v1.0 | TinyLlama 1.1B | TinyLlama
1100 TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T
1177 allenai/OLMo-1B-hf | OLMo 1B
6888 allenai/OLMo-7B-hf | OLMo-7B | allenai/OLMo-7B-0724-hf
1485 allenai/OLMo-2-0425-1B
7299 allenai/OLMo-2-1124-7B | OLMo2-7B | OLMo 2 7B
13716 allenai/OLMo-2-1124-13B-Instruct | OLMo2 13B
32234 allenai/OLMo-2-0325-32B
6919 allenai/OLMoE-1B-7B-0924
6910 deepseek-ai/deepseek-llm-7b-base | deepseek-7b | deepseek-ai/deepseek-llm-7b-chat | DeepSeek LLM 7B
67425 deepseek-ai/deepseek-llm-67b-base | DeepSeek 67B
1346 deepseek-ai/deepseek-coder-1.3b-base
6740 deepseek-ai/deepseek-coder-6.7b-instruct | DeepSeek Coder 6.7B
33343 deepseek-ai/deepseek-coder-33b-base
1777 deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B
7616 deepseek-ai/DeepSeek-R1-Distill-Qwen-7B
8030 deepseek-ai/DeepSeek-R1-Distill-Llama-8B
70554 deepseek-ai/DeepSeek-R1-Distill-Llama-70B
6910 deepseek-ai/deepseek-math-7b-instruct | deepseek-ai/deepseek-coder-7b-instruct-v1.5
6061 01-ai/Yi-6B | Yi-6B-Chat | 01-ai/Yi-1.5-6B | Yi 6B | Yi-6B-200K
8829 01-ai/Yi-9B | 01-ai/Yi-1.5-9B-Chat | 01-ai/Yi-Coder-9B
34389 01-ai/Yi-34B | 01-ai/Yi-34B-Chat | 01-ai/Yi-1.5-34B | NousResearch/Nous-Hermes-2-Yi-34B
1476 01-ai/Yi-Coder-1.5B
7321 internlm/internlm-7b | internlm-chat-7b
20088 internlm/internlm-20b | internlm-chat-20b
1889 internlm/internlm2-1_8b | internlm/internlm2-chat-1_8b | internlm/internlm2_5-1_8b-chat
7738 internlm/internlm2-7b | internlm2-chat-7b | internlm/internlm2_5-7b-chat | InternLM2-7B | InternLM2.5 7B
19861 internlm/internlm2-20b | internlm/internlm2-chat-20b | internlm/internlm2_5-20b-chat
8804 internlm/internlm3-8b-instruct
7000 baichuan-inc/Baichuan-7B | Baichuan 7B
13265 baichuan-inc/Baichuan-13B-Chat | Baichuan-13B
7506 baichuan-inc/Baichuan2-7B-Base | baichuan2-7b-chat | Baichuan 2 7B
13897 baichuan-inc/Baichuan2-13B-Chat | Baichuan2 13B
6173 THUDM/chatglm-6b | ChatGLM-6B
6244 THUDM/chatglm2-6b | ChatGLM2 6B | chatglm3-6b-base | THUDM/chatglm3-6b | ChatGLM3-6B | chatglm3-6b-32k
9400 THUDM/glm-4-9b-chat | glm4-9b | GLM-4-9B | THUDM/glm-4-9b-chat-1m
9400 THUDM/GLM-4-9B-0414 | THUDM/GLM-Z1-9B-0414
32566 THUDM/GLM-4-32B-0414
34981 CohereForAI/c4ai-command-r-v01 | Command-R | command-r 35B | CohereForAI/aya-23-35B
103811 CohereForAI/c4ai-command-r-plus | Command R+
32296 CohereForAI/c4ai-command-r-08-2024 | CohereForAI/aya-expanse-32b
8028 CohereForAI/c4ai-command-r7b-12-2024 | CohereForAI/aya-expanse-8b | CohereForAI/aya-23-8B
2534 ibm-granite/granite-3.1-2b-instruct | ibm-granite/granite-3.3-2b-instruct
8171 ibm-granite/granite-3.0-8b-instruct | granite-3.1-8b-base | ibm-granite/granite-3.3-8b-instruct
3483 ibm-granite/granite-3b-code-base
8055 ibm-granite/granite-8b-code-instruct
20074 ibm-granite/granite-20b-code-base
33680 ibm-granite/granite-34b-code-base
6738 ibm-granite/granite-7b-base
15517 bigcode/starcoder | StarCoder 15.5B | bigcode/starcoderbase | StarCoder-15B
1137 bigcode/starcoderbase-1b
3043 bigcode/starcoderbase-3b
7327 bigcode/starcoderbase-7b
3030 bigcode/starcoder2-3b | StarCoder2 3B
7174 bigcode/starcoder2-7b
15958 bigcode/starcoder2-15b
6739 codellama/CodeLlama-7b-hf | Code Llama 7B | codellama-7b-instruct | CodeLlama-7b-Python-hf
13016 codellama/CodeLlama-13b-hf
33744 codellama/CodeLlama-34b-Instruct-hf | CodeLlama 34B
68977 codellama/CodeLlama-70b-hf
356.7 Salesforce/codegen-350M-mono
2779 Salesforce/codegen-2B-multi
7069 Salesforce/codegen-6B-mono
16032 Salesforce/codegen-16B-mono
1125 bigcode/santacoder | gpt_bigcode-santacoder
60.5 t5-small | google-t5/t5-small | T5 small
222.9 t5-base | T5-Base | Salesforce/codet5-base
737.7 t5-large | google-t5/t5-large
2851.6 t5-3b | T5 3B
11307 t5-11b | T5-11B | google-t5/t5-11b
77.0 google/flan-t5-small | google/t5-v1_1-small
247.6 google/flan-t5-base | FLAN-T5 base | google/t5-v1_1-base
783.2 google/flan-t5-large | flan-t5 large
2849.8 google/flan-t5-xl | FLAN-T5-XL | google/t5-v1_1-xl | FLAN-T5 3B
11135 google/flan-t5-xxl | FLAN-T5 XXL | flan-t5-11b | bigscience/T0pp
300.2 google/mt5-small | bigscience/mt0-small
582.4 google/mt5-base | mT5 base
1229.6 google/mt5-large
3742.6 google/mt5-xl | bigscience/mt0-xl
12921 google/mt5-xxl | bigscience/mt0-xxl-mt
19460 google/ul2 | google/flan-ul2 | Flan-UL2 20B
299.6 google/byt5-small
581.7 google/byt5-base
1228 google/byt5-large
139.4 facebook/bart-base | BART base
406.3 facebook/bart-large | BART-large | facebook/bart-large-cnn | facebook/bart-large-mnli
406.3 facebook/bart-large-xsum
305.5 sshleifer/distilbart-cnn-12-6
610.9 facebook/mbart-large-cc25 | facebook/mbart-large-50 | mBART-50
568.7 google/pegasus-large | google/pegasus-xsum | google/pegasus-cnn_dailymail
109.5 bert-base-uncased | google-bert/bert-base-uncased | BERT-base | BERT Base | bert_base
109.5 BAAI/bge-base-en-v1.5
108.3 bert-base-cased
335.1 bert-large-uncased | BERT-Large | google-bert/bert-large-uncased | bert-large-uncased-whole-word-masking
177.9 bert-base-multilingual-cased
102.3 bert-base-chinese
66.4 distilbert-base-uncased | DistilBERT | distilbert/distilbert-base-uncased
124.6 roberta-base | FacebookAI/roberta-base | RoBERTa base | microsoft/codebert-base
355.4 roberta-large | RoBERTa-Large | FacebookAI/roberta-large
82.1 distilroberta-base
278.0 xlm-roberta-base | FacebookAI/xlm-roberta-base | XLM-R base | xlm-r-base
559.9 xlm-roberta-large | XLM-RoBERTa-large | XLM-R large
108.9 google/electra-base-discriminator
334.1 google/electra-large-discriminator
22.7 sentence-transformers/all-MiniLM-L6-v2
33.4 BAAI/bge-small-en-v1.5
110.6 camembert-base
86.6 google/vit-base-patch16-224 | ViT-B/16 | vit-base | facebook/deit-base-patch16-224
304.3 google/vit-large-patch16-224 | ViT-L/16
632.0 google/vit-huge-patch14-224-in21k | ViT-H/14
6738 lmsys/vicuna-7b-v1.5 | Vicuna 7B | WizardLM/WizardLM-7B-V1.0 | microsoft/Orca-2-7b
6738 stabilityai/StableBeluga-7B | alpaca-7b | togethercomputer/LLaMA-2-7B-32K | LLM360/Amber
13016 lmsys/vicuna-13b-v1.5 | WizardLM/WizardLM-13B-V1.2 | microsoft/Orca-2-13b
6889 Salesforce/xgen-7b-8k-base
10732 upstage/SOLAR-10.7B-v1.0 | SOLAR 10.7B Instruct
1831 h2oai/h2o-danube-1.8b-base
2405 LGAI-EXAONE/EXAONE-3.5-2.4B-Instruct
7818 LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct | LGAI-EXAONE/EXAONE-3.0-7.8B-Instruct
4191 nvidia/Nemotron-Mini-4B-Instruct
20915 openai/gpt-oss-20b | gpt-oss 20B
116829 openai/gpt-oss-120b
2725 openbmb/MiniCPM-2B-sft-bf16 | MiniCPM 2B
7250 Qwen/CodeQwen1.5-7B
109.5 nlpaueb/legal-bert-base-uncased
"""
REFUSED = """
Llama-3.2-11B-Vision-Instruct | meta-llama/Llama-4-Scout-17B-16E | deepseek-ai/DeepSeek-V2-Lite | DeepSeek-V3 |
deepseek-ai/DeepSeek-R1 | state-spaces/mamba-2.8b | ai21labs/Jamba-v0.1 | RWKV/rwkv-4-7b-pile |
llava-hf/llava-1.5-7b-hf | LLaVA-1.5-7B | Qwen/Qwen-VL-Chat | Qwen/Qwen2-VL-7B-Instruct |
Qwen/Qwen2.5-VL-7B-Instruct | OpenGVLab/InternVL2-8B | openai/whisper-large-v3 | whisper-small |
openai/whisper-tiny | facebook/wav2vec2-base | wav2vec2-large-960h | facebook/hubert-base-ls960 |
openai/clip-vit-large-patch14 | openai/clip-vit-base-patch32 | stabilityai/stable-diffusion-xl-base-1.0 | SDXL |
runwayml/stable-diffusion-v1-5 | SD 1.5 | stabilityai/stable-diffusion-2-1 | black-forest-labs/FLUX.1-dev |
FLUX.1 dev | google/gemma-3n-E2B-it | google/paligemma-3b-pt-224 | google/recurrentgemma-2b |
tiiuae/falcon-mamba-7b | microsoft/Phi-3-vision-128k-instruct | microsoft/Phi-3.5-vision-instruct |
microsoft/Phi-4-multimodal-instruct | ibm-granite/granite-4.0-h-small | Zyphra/Zamba2-7B | google/umt5-base |
google/long-t5-tglobal-base | mistralai/Pixtral-12B-2409 | apple/OpenELM-1_1B | xai-org/grok-1 |
databricks/dbrx-base | Qwen/Qwen2-Audio-7B | Qwen/Qwen2.5-Omni-7B | microsoft/Phi-3-small-8k-instruct |
HuggingFaceM4/idefics2-8b | HuggingFaceTB/SmolVLM-Instruct | openbmb/MiniCPM-V-2_6 | Qwen/Qwen3-VL-8B-Instruct |
Qwen/Qwen3-Next-80B-A3B-Instruct | THUDM/glm-4v-9b | THUDM/cogvlm2-llama3-chat-19B |
facebook/nllb-200-distilled-600M | facebook/m2m100_418M | Helsinki-NLP/opus-mt-en-de |
nvidia/parakeet-tdt-0.6b-v2 | suno/bark | google/bigbird-roberta-base | allenai/longformer-base-4096 |
YituTech/conv-bert-base | squeezebert-uncased | google/mobilebert-uncased | xlm-mlm-en-2048 | xlnet-base-cased |
transfo-xl-wt103 | facebook/xglm-564M | facebook/xglm-7.5B | google/fnet-base | microsoft/layoutlmv3-base |
microsoft/trocr-base | naver-clova-ix/donut-base | Salesforce/blip2-opt-2.7b | Salesforce/instructblip-vicuna-7b
| internlm/internlm-xcomposer2-7b | deepseek-ai/deepseek-vl-7b-chat | deepseek-ai/Janus-Pro-7B |
GLM-4.1V-9B-Thinking | google/siglip-base-patch16-224 | facebook/dinov2-base | facebook/sam-vit-base |
Bert-VITS2 | GPT-SoVITS | HPT-7B | mPLUG-Owl-7B | google/electra-small-discriminator | albert-base-v2 |
microsoft/deberta-v3-base | answerdotai/ModernBERT-base | sentence-transformers/all-mpnet-base-v2 |
microsoft/beit-base-patch16-224 | microsoft/swin-tiny-patch4-window7-224 |
deepseek-ai/deepseek-moe-16b-base | vinai/bertweet-base | fnlp/moss-moon-003-base
"""


def shape(name: str) -> Architecture:
    row = {
        "id": "x",
        "model": name,
        "gpu": "A100 80GB",
        "n_gpus": "1",
        "framework": "HF Trainer",
        "micro_batch": "1",
        "seq_len": "224x224" if "vit" in name.lower() or "deit" in name.lower() else "512",
        "precision": "bf16",
        "act_ckpt": "True",
        "optimizer": "AdamW",
    }
    found = described_row(row).training.shape
    assert isinstance(found, Architecture)
    return found


@pytest.mark.parametrize("line", PUBLISHED.splitlines())
def test_a_public_model_has_its_published_size_under_every_name(line: str) -> None:
    millions, names = line.split(" ", 1)
    found = {name: shape(name).parameters / 1e6 for name in names.split(" | ")}
    assert found == {name: pytest.approx(float(millions), rel=0.01) for name in found}


@pytest.mark.parametrize("name", " ".join(REFUSED.split()).split(" | "))
def test_a_model_without_a_closed_form_is_refused(name: str) -> None:
    with pytest.raises(SpecError):
        shape(name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek-ai/DeepSeek-R1", "latent attention"),
        ("moonshotai/Kimi-K2-Instruct", "latent attention"),
        ("Pixtral-12B-2409", "this kind of transformer"),
        ("answerdotai/ModernBERT-base", "this kind of transformer"),
        ("google/bigbird-roberta-base", "this kind of transformer"),
    ],
)
def test_a_refusal_says_why(name: str, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        shape(name)


def test_a_relative_is_known_by_name_alone_where_its_shape_is() -> None:
    assert known("dolphin-2.9-llama3-8b") == known("llama-3-8b") is not None
    assert known("Frobnicator-3-9b") is None
