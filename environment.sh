# shellcheck shell=sh
# Environment variables of this project with their defaults. Values that are already set are kept.
# Usage: source environment.sh
# Generated from the table in afm/settings.py: python -m afm.settings > environment.sh

# Address on which the tool servers listen and are called.
export SERVER_HOST="${SERVER_HOST:-127.0.0.1}"

# Port of the page reader.
export CRAWL_PAGE_PORT="${CRAWL_PAGE_PORT:-9000}"

# Port of the web search server.
export WEBSEARCH_PORT="${WEBSEARCH_PORT:-9001}"

# Port of the code server.
export CODE_SERVER_PORT="${CODE_SERVER_PORT:-9002}"

# Shared by code servers and the code tool; needed beyond this machine.
export CODE_SERVER_TOKEN="${CODE_SERVER_TOKEN:-}"

# Port of the image server.
export VISUAL_INSPECTOR_PORT="${VISUAL_INSPECTOR_PORT:-9003}"

# Port on which tools are offered to MCP clients.
export MCP_SERVER_PORT="${MCP_SERVER_PORT:-9004}"

# Shared by the MCP server and its clients; needed beyond this machine.
export MCP_SERVER_TOKEN="${MCP_SERVER_TOKEN:-}"

# Port of the recording gateway.
export GATEWAY_PORT="${GATEWAY_PORT:-9005}"

# First part of the API key that the gateway's clients send; needed beyond this machine.
export GATEWAY_TOKEN="${GATEWAY_TOKEN:-}"

# OpenAI-compatible endpoint behind the gateway, with its /v1.
export GATEWAY_UPSTREAM_URL="${GATEWAY_UPSTREAM_URL:-}"

# Key of the endpoint behind the gateway; clients of the gateway never need it.
export GATEWAY_UPSTREAM_API_KEY="${GATEWAY_UPSTREAM_API_KEY:-}"

# Address to which wiki queries are posted.
export WIKI_RAG_SERVER_URL="${WIKI_RAG_SERVER_URL:-http://127.0.0.1:8000/retrieve}"

# Shared by wiki servers and the wiki search tool; needed beyond this machine.
export WIKI_SERVER_TOKEN="${WIKI_SERVER_TOKEN:-}"

# Shared by the search, page and image servers and their tools; needed beyond this machine.
export WEB_SERVER_TOKEN="${WEB_SERVER_TOKEN:-}"

# Cache of searches, pages and looks at images: a file, or redis://HOST:6379/0; unset: ~/.cache/afm/web.sqlite.
export WEB_CACHE="${WEB_CACHE:-}"

# Source of web search results: local needs no key, serper (also: serapi) does.
export WEB_SEARCH_METHOD_TYPE="${WEB_SEARCH_METHOD_TYPE:-local}"

# JSONL of pages {url, title, text} that the local web search searches.
export WEB_PAGE_STORE="${WEB_PAGE_STORE:-}"

# Address of a SearxNG server whose JSON format is switched on.
export SEARXNG_BASE_URL="${SEARXNG_BASE_URL:-}"

# Results of one web search.
export WEB_SEARCH_SERP_NUM="${WEB_SEARCH_SERP_NUM:-10}"

# Key of the Serper-compatible search service.
export WEB_SEARCH_SERPER_API_KEY="${WEB_SEARCH_SERPER_API_KEY:-}"

# Address of the page reader service.
export JINA_BASE_URL="${JINA_BASE_URL:-https://r.jina.ai}"

# Key of the page reader service.
export JINA_API_KEY="${JINA_API_KEY:-}"

# OpenAI-compatible endpoint that summarises pages; unset: extracts instead.
export SUMMARY_OPENAI_API_BASE_URL="${SUMMARY_OPENAI_API_BASE_URL:-}"

# Key of the summary endpoint.
export SUMMARY_OPENAI_API_KEY="${SUMMARY_OPENAI_API_KEY:-}"

# Model that summarises pages.
export SUMMARY_MODEL="${SUMMARY_MODEL:-}"

# OpenAI-compatible endpoint that looks at images; the image server needs it.
export VISION_OPENAI_API_BASE_URL="${VISION_OPENAI_API_BASE_URL:-}"

# Key of the vision endpoint.
export VISION_OPENAI_API_KEY="${VISION_OPENAI_API_KEY:-}"

# Model that looks at images.
export VISION_MODEL="${VISION_MODEL:-}"

# Images below this folder may be named by their path; unset: by address only.
export VISION_IMAGE_FOLDER="${VISION_IMAGE_FOLDER:-}"

# OpenAI-compatible endpoint of the judge; unset: exact match instead.
export GRM_BASE_URL="${GRM_BASE_URL:-}"

# Key of the judge's endpoint.
export GRM_API_KEY="${GRM_API_KEY:-}"

# Model that judges answers.
export GRM_MODEL_NAME="${GRM_MODEL_NAME:-gpt-4.1-mini}"

# Folder with the LiveCodeBench test cases.
export LIVECODEBENCH_DATA_PATH="${LIVECODEBENCH_DATA_PATH:-}"

# OpenAI-compatible endpoint of the team that afm data distill --team runs.
export TEACHER_BASE_URL="${TEACHER_BASE_URL:-}"

# Key of the team's endpoint.
export TEACHER_API_KEY="${TEACHER_API_KEY:-}"

# Model of the team's members whose file names none.
export TEACHER_MODEL_NAME="${TEACHER_MODEL_NAME:-}"

# Key of the OpenAI-compatible endpoint that serves the agent's model.
export AFM_MODEL_API_KEY="${AFM_MODEL_API_KEY:-}"

# Run code that was downloaded or belongs to another user: Python files and programs of a YAML; --trust sets it.
export AFM_TRUST="${AFM_TRUST:-}"

# Show the whole traceback of an error on the command line.
export AFM_TRACEBACK="${AFM_TRACEBACK:-}"
