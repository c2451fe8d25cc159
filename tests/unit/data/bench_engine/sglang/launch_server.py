# SPDX-License-Identifier: Apache-2.0
"""Answers as an engine does, with text made of the prompt's ids, and with the faults that its flags ask for."""

import argparse
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--max-total-tokens", type=int)
parser.add_argument("--speculative-algorithm")
parser.add_argument("--fake-step", type=int, default=1)  # tokens a step gives
parser.add_argument("--fake-ms", type=float, default=1)  # ms a step takes
parser.add_argument("--fake-change", type=int)  # place of a token that is another one, and all after it
parser.add_argument("--fake-gap", type=float, default=0.1)  # how much less likely that token is
parser.add_argument("--fake-loop", action="store_true")  # the same token over and over
parser.add_argument("--fake-refuse", action="store_true")  # does not start
parser.add_argument("--fake-die", type=int)  # requests of more than 4 tokens until it dies
parser.add_argument("--fake-leak", action="store_true")  # loses a token of its pool per answer
parser.add_argument("--fake-keep", type=int)  # flushes until it can't flush any more
args, _ = parser.parse_known_args()
state = {"answers": 0, "used": 0, "flushes": 0}


def log(text):
    print(text, flush=True)


def text_of(prompt, new):
    if args.fake_loop:
        return [10] * new
    ids = [10 + 2 * ((sum(prompt) + 7 * i * i) % 500) for i in range(new)]
    if args.fake_change is not None:
        ids = ids[: args.fake_change] + [token + 1 for token in ids[args.fake_change :]]
    return ids


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def send(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def chunk(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def do_GET(self):
        load = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": state["used"]}
        self.send({"loads": [{**load, "max_total_num_tokens": args.max_total_tokens}]} if "loads" in self.path else {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path.startswith("/flush_cache"):
            state["flushes"] += 1
            if args.fake_keep is not None and state["flushes"] > args.fake_keep:
                return self.send_error(400, "there are pending requests")
            return self.send({})
        prompt = body.get("input_ids") or list(body["text"].encode())
        new = body["sampling_params"]["max_new_tokens"]
        if new > 4:
            state["answers"] += 1
            state["used"] += args.fake_leak
            if args.fake_die is not None and state["answers"] > args.fake_die:
                log("RuntimeError: it was too much")
                os._exit(3)
        ids = text_of(prompt, new)
        steps = -(-(new - 1) // args.fake_step)
        meta = {"completion_tokens": new}
        if args.speculative_algorithm:
            meta["spec_verify_ct"] = steps
        if body.get("return_logprob"):
            start = body["logprob_start_len"]
            meta["input_token_logprobs"] = [[-0.5, token, None] for token in prompt[start:]]
            meta["input_top_logprobs"] = [
                [[-0.5, token, None], [-0.5 - args.fake_gap, token + 1, None]] for token in prompt[start:]
            ]
        if os.environ.get("SGLANG_DDTREE_TIMING") == "1" and args.speculative_algorithm == "DDTREE" and new > 4:
            log(
                f"DDTREE timing steps={steps} draft_ms=1.5 build_ms=0.1 verify_ms=2.5 commit_ms=0.05 host_ms=0.2 batch=1"
            )
        if not body.get("stream"):
            time.sleep(steps * args.fake_ms / 1000)
            return self.send({"output_ids": ids, "text": " ".join(map(str, ids)), "meta_info": meta})
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for count in [*range(1, new, args.fake_step), new]:
            message = {"output_ids": ids[:count], "text": " ".join(map(str, ids[:count])), "meta_info": meta}
            self.chunk(b"data: " + json.dumps(message).encode() + b"\n\n")
            time.sleep(args.fake_ms / 1000)
        self.chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")
        return None


class Server(ThreadingHTTPServer):
    request_queue_size = 128


if args.fake_refuse:
    print("ValueError: budget 63 does not fit, the largest that fits is 31", flush=True)
    sys.exit(1)
log(f"server_args={sys.argv[1:]}")
if args.speculative_algorithm in ("DFLASH", "DDTREE"):
    log(f"Initialized {args.speculative_algorithm} draft runner. budget=7")
    log(f"{args.speculative_algorithm} verify completed. num_accepted_drafts_per_req=[3]")
if args.speculative_algorithm == "DDTREE":
    log("DDTREE metrics steps=1 requests=1")
Server(("127.0.0.1", args.port), Handler).serve_forever()
