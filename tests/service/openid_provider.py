"""A small OpenID provider as a process: discovery, keys, authorization code with PKCE, tokens signed by a real RSA key.

`POST /next` with JSON says what the next token shall have wrong. Prints its port.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import OctKey, RSAKey

CLIENT, SECRET = "orc", "the-secret-of-the-client"
KEY = RSAKey.generate_key(2048, {"kid": "right", "use": "sig"})
OTHER = RSAKey.generate_key(2048, {"kid": "right", "use": "sig"})  # says that it is the right one


class Provider(BaseHTTPRequestHandler):
    codes: dict[str, dict[str, str]]
    wrong: dict[str, Any]

    @property
    def issuer(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path, query = (
            urlsplit(self.path).path,
            {k: v[0] for k, v in parse_qs(urlsplit(self.path).query).items()},
        )
        if path == "/.well-known/openid-configuration":
            self._json(
                {
                    "issuer": self.wrong.get("issuer", self.issuer),
                    "authorization_endpoint": f"{self.issuer}/authorize",
                    "token_endpoint": self.wrong.get("token_endpoint", f"{self.issuer}/token"),
                    "jwks_uri": f"{self.issuer}/keys",
                }
            )
        elif path == "/keys":
            self._json({"keys": [KEY.as_dict(private=False)]})
        elif path == "/authorize":
            assert query["response_type"] == "code"
            assert query["code_challenge_method"] == "S256"
            code = secrets.token_urlsafe(16)
            self.codes[code] = query
            back = {
                "code": code,
                "state": query["state"],
                "iss": self.wrong.get("answering", self.issuer),
            }
            self.send_response(302)
            self.send_header("Location", f"{query['redirect_uri']}?{urlencode(back)}")
            self.end_headers()
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.path == "/next":
            self.wrong.clear()
            self.wrong.update(json.loads(body))
            self._json({})
            return
        form = {name: values[0] for name, values in parse_qs(body).items()}
        login = self.codes.get(form["code"])
        if "codes" not in self.wrong:
            self.codes.pop(form["code"], None)  # each counts once
        basic = base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
        challenge = base64.urlsafe_b64encode(
            hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        )
        if (
            login is None
            or self.headers.get("Authorization") != f"Basic {basic}"
            or challenge.rstrip(b"=").decode() != login["code_challenge"]
            or form["redirect_uri"] != login["redirect_uri"]
        ):
            self._json({"error": "invalid_grant"}, 400)
            return
        self._json(
            {
                "access_token": "opaque",
                "token_type": "Bearer",
                "id_token": self._token(login["nonce"]),
            }
        )

    def _token(self, nonce: str) -> str:
        now_s = int(time.time())
        claims = {
            "iss": self.issuer,
            "aud": CLIENT,
            "sub": "4711",
            "iat": now_s,
            "exp": now_s + 300,
            "nonce": nonce,
            "email": "ada@example.org",
            "email_verified": True,
            "groups": ["gpu-users"],
        }
        claims = {
            name: value
            for name, value in (claims | self.wrong.get("claims", {})).items()
            if value is not None
        }
        header = {"alg": "RS256", "kid": "right"}
        match self.wrong.get("signature"):
            case "none":
                parts = (json.dumps(section).encode() for section in ({"alg": "none"}, claims))
                return "".join(
                    base64.urlsafe_b64encode(part).rstrip(b"=").decode() + "." for part in parts
                )
            case "another key":
                return jwt.encode(header, claims, OTHER)
            case "the public key as a secret":
                secret = OctKey.import_key(KEY.as_pem(private=False))
                return jwt.encode({"alg": "HS256", "kid": "right"}, claims, secret)
            case "a key of its own":
                inside = OTHER.as_dict(private=False)
                return jwt.encode({**header, "kid": "mine", "jwk": inside}, claims, OTHER)
        return jwt.encode(header, claims, KEY)

    def _json(self, reply: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    Provider.codes, Provider.wrong = {}, {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Provider)
    print(server.server_address[1], flush=True)
    server.serve_forever()
