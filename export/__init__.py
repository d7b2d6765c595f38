"""Turns a published checkpoint into model.bin (model/format.md): python3 -m export SOURCE -o FILE.

__main__.py   the command line
model.py      what a source hands to the writer: a config, a tokenizer, tensors read on demand
huggingface.py, gguf_file.py, llama2c.py, llmc.py   the kinds of source; gpt2.py, of GPT-2
config.py     config.json; families.py, what a family is; settings.py, checked values
gguf_config.py   GGUF's metadata, as a config.json would say it
rope.py       RoPE frequencies, and every kind of scaling as tables and a factor
tokenizer.py  the tokenizer section; bpe.py and sentencepiece_model.py, the two kinds of it
chat.py       the shape of a chat, from the marks in its template
format.py     the layout of model.bin; writer.py streams it to the disk and reads it back
files.py, errors.py   reading JSON and numbers; the one kind of error
fetch_demo.py fetches the demo's GGUF file
"""
