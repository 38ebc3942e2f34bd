"""Two hundred schemas of the kinds that people send, written for these tests."""

from __future__ import annotations

from itertools import product
from typing import Any

Schema = dict[str, Any]
DRAFT4, DRAFT7 = "http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema#"
DRAFT2019, DRAFT2020 = (f"https://json-schema.org/draft/{one}/schema" for one in ("2019-09", "2020-12"))
S, I, N, B, ANY = ({"type": one} for one in ("string", "integer", "number", "boolean", "object"))
NULL: Schema = {"type": "null"}


def s(**more: Any) -> Schema:
    return {"type": "string", **more}


def i(low: int | None = None, high: int | None = None) -> Schema:
    bounds = {"minimum": low, "maximum": high}
    return {"type": "integer", **{key: value for key, value in bounds.items() if value is not None}}


def e(*values: Any) -> Schema:
    return {"enum": list(values)}


def a(items: Any, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def o(required: str = "", /, _more: Schema | None = None, **properties: Any) -> Schema:
    """An object; keys that Python has for itself end in an underscore."""
    named = {key.rstrip("_"): value for key, value in properties.items()}
    out: Schema = {"type": "object", "properties": named}
    if required:
        out["required"] = required.split()
    return {**out, **(_more or {})}


def closed(required: str = "", /, **properties: Any) -> Schema:
    return o(required, {"additionalProperties": False}, **properties)


def maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def strict(**properties: Any) -> Schema:
    """As OpenAI's strict mode wants it: all properties required, no others."""
    return closed(" ".join(key.rstrip("_") for key in properties), **properties)


def ref(name: str, where: str = "$defs") -> Schema:
    return {"$ref": f"#/{where}/{name}"}


URI, EMAIL, DATE, TIME, UUID = (s(format=one) for one in ("uri", "email", "date", "date-time", "uuid"))

CALLS = [
    o("city", city=S, unit=e("celsius", "fahrenheit")),
    strict(city=S, unit=e("celsius", "fahrenheit"), days=i(1, 14)),
    o("query", query=s(minLength=1), limit=i(1, 100), offset=i(0), filters=ANY),
    strict(to=a(EMAIL, minItems=1), cc=maybe(a(EMAIL)), subject=s(maxLength=200), body=S),
    o("origin destination date", origin=s(pattern="^[A-Z]{3}$"), destination=s(pattern="^[A-Z]{3}$"), date=DATE,
      passengers=i(1, 9), cabin=e("economy", "premium", "business", "first")),
    strict(amount={"type": "number", "exclusiveMinimum": 0}, from_=s(pattern="^[A-Z]{3}$"), to=s(pattern="^[A-Z]{3}$")),
    o("title start", title=S, start=TIME, end=TIME, attendees=a(EMAIL, uniqueItems=True), reminder=i(0, 10080)),
    o("sql", sql=S, parameters=a({"type": ["string", "number", "boolean", "null"]}), timeout=N),
    strict(expression=S), strict(url=URI), o(), closed(), o("path", path=S, content=S, mode=e("w", "a")),
    strict(path=S, line=i(1), new=maybe(S)), o("command", command=S, args=a(S), env={"type": "object",
           "additionalProperties": S}, cwd=S, timeout=i(0, 600)),
    strict(steps=a(strict(explanation=S, output=S)), final_answer=S),
    strict(sentiment=e("positive", "neutral", "negative"), confidence={"type": "number", "minimum": 0, "maximum": 1}),
    strict(entities=a(strict(name=S, kind=e("person", "place", "organization"), start=i(0), end=i(0)))),
    o("items", items=a(closed("sku quantity", sku=s(pattern="^[A-Z0-9-]{4,12}$"), quantity=i(1, 999),
      price={"type": "number", "minimum": 0, "multipleOf": 0.01}), minItems=1), coupon=s(maxLength=16)),
    {**strict(node=ref("node")), "$defs": {"node": strict(value=S, children=a(ref("node")))}},
    {**strict(ui=ref("ui")), "$defs": {"ui": strict(type=e("div", "button", "form"), label=S, children=a(ref("ui")),
     attributes=a(strict(name=S, value=S)))}},
    strict(answer={"anyOf": [strict(kind={"const": "text"}, text=S), strict(kind={"const": "number"}, value=N)]}),
    o("contact", contact={"oneOf": [closed("email", email=EMAIL), closed("phone", phone=s(pattern="^\\+[0-9]{6,15}$"))]}),
    o("action", action=e("create", "update", "delete"), id=S, data=ANY, _more={"if": {"properties": {"action": {
      "const": "create"}}}, "then": {"required": ["data"]}, "else": {"required": ["id"]}}),
    strict(latitude={"type": "number", "minimum": -90, "maximum": 90}, longitude={"type": "number", "minimum": -180,
           "maximum": 180}), strict(color=s(pattern="^#[0-9a-fA-F]{6}$")), strict(seconds=i(0, 86400), label=maybe(S)),
    o("symbol", symbol=s(pattern="^[A-Z.]{1,6}$"), range=e("1d", "5d", "1mo", "1y"), interval=e("1m", "1h", "1d")),
    o("messages", messages=a(closed("role content", role=e("system", "user", "assistant"), content=S), minItems=1)),
    {"type": "array", "items": strict(tool=S, arguments=ANY), "minItems": 1, "maxItems": 5},
]  # fmt: skip

PERSON = {"oneOf": [S, closed("name", name=S, email=EMAIL, url=URI)]}
CONFIGS = [
    {"$schema": DRAFT7, **o("name version", name=s(pattern="^(?:@[a-z0-9-~][a-z0-9-._~]*/)?[a-z0-9-~][a-z0-9-._~]*$",
      maxLength=214), version=S, private=B, author=PERSON, license=S, scripts={"type": "object",
      "additionalProperties": S}, dependencies=ref("deps", "definitions"), devDependencies=ref("deps", "definitions")),
      "definitions": {"deps": {"type": "object", "additionalProperties": S}}},
    {"$schema": DRAFT7, **o("on jobs", name=S, on={"oneOf": [e("push", "pull_request"), a(e("push", "pull_request"),
      minItems=1), ANY]}, jobs={"type": "object", "minProperties": 1, "additionalProperties": False,
      "patternProperties": {"^[_a-zA-Z][a-zA-Z0-9_-]*$": o("runs-on", needs={"oneOf": [S, a(S)]}, steps=a(o(uses=S,
      run=S, name=S)), **{"runs-on": S, "timeout-minutes": N})}})},
    closed("version updates", version={"const": 2}, updates=a(closed("directory schedule", directory=S, ignore=a(S),
      schedule=closed("interval", interval=e("daily", "weekly", "monthly"), time=s(pattern="^([01]\\d|2[0-3]):[0-5]\\d$"))))),
    closed(printWidth=i(1), tabWidth=i(0), useTabs=B, semi=B, quotes=e("single", "double"), parser=maybe(S),
           overrides=a(closed("files", files={"oneOf": [S, a(S)]}, options=ANY))),
    {"$schema": DRAFT7, **o(root=B, extends={"oneOf": [S, a(S)]}, env={"type": "object", "additionalProperties": B},
      rules={"type": "object", "additionalProperties": {"oneOf": [e(0, 1, 2, "off", "warn", "error"),
      {"type": "array", "items": [e(0, 1, 2, "off", "warn", "error")], "additionalItems": True, "minItems": 1}]}})},
    o(compilerOptions=o(target=e("es5", "es2020", "esnext"), strict=B, lib=a(S), paths={"type": "object",
      "additionalProperties": a(S)}, outDir=S), include=a(S), exclude=a(S), files=a(S)),
    o("version services", version=S, services={"type": "object", "patternProperties": {"^[a-zA-Z0-9._-]+$": o(image=S,
      ports=a({"type": ["string", "number"]}), environment={"oneOf": [{"type": "object", "additionalProperties": {
      "type": ["string", "number", "null"]}}, a(S)]}, restart=S)}, "additionalProperties": False}),
    o(language=S, python=a({"type": ["string", "number"]}), install={"oneOf": [S, a(S)]}, script={"oneOf": [S, a(S)]}),
    closed("site_name", site_name=S, nav=a({"type": "object", "additionalProperties": S}), theme={"oneOf": [S, o("name",
      name=S)]}, plugins=a({"anyOf": [S, ANY]})),
    closed(line_length=i(40, 200), select=a(s(pattern="^[A-Z]+[0-9]*$")), ignore=a(S), target=e("py39", "py311", "py313")),
    {"$schema": DRAFT2020, "$id": "https://example.org/tasks.json", **o("version tasks", version=s(pattern="^2\\.\\d+$"),
      tasks=a(ref("task"))), "$defs": {"task": o("label", label=S, type=e("shell", "process"), command=S, args=a(S),
      dependsOn={"anyOf": [S, a(S)]}, group={"anyOf": [e("build", "test"), closed("kind", kind=e("build", "test"),
      isDefault=B)]})}},
    o("folders", folders=a(closed("path", path=S, name=S)), settings=ANY, extensions=o(recommendations=a(s(pattern=
      "^[a-z0-9-]+\\.[a-z0-9-]+$")))),
    closed("log", log=closed("level", level=e("debug", "info", "error"), file=maybe(S), rotate=closed(size=s(pattern=
      "^\\d+(k|M|G)$"), keep=i(1, 100)))), closed("host port", host={"anyOf": [s(format="hostname"), s(format="ipv4"),
      s(format="ipv6")]}, port=i(1, 65535), tls=closed("cert key", cert=S, key=S, versions=a(e("1.2", "1.3"),
      uniqueItems=True))), o(name=S, matrix={"type": "object", "additionalProperties": a({"type": ["string", "number",
      "boolean"]}, minItems=1)}),
    {"type": "object", "properties": {"a": I, "b": I, "c": I}, "dependentRequired": {"a": ["b"], "b": ["c"]}},
    {"$schema": DRAFT7, "type": "object", "properties": {"user": S, "password": S, "token": S}, "dependencies": {"user":
      ["password"]}, "oneOf": [{"required": ["user"]}, {"required": ["token"]}]},
    {"type": "object", "additionalProperties": {"anyOf": [S, N, B]}, "propertyNames": {"pattern": "^[A-Z_][A-Z0-9_]*$"}},
    o("include", include=a(S, uniqueItems=True), keywords=a(s(minLength=1), uniqueItems=True)),
    {"type": "object", "patternProperties": {"^x-": {}}, "properties": {"info": o("title", title=S)}, "required": ["info"],
      "additionalProperties": False},
]  # fmt: skip

META = o("name", name=s(maxLength=253, pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"), namespace=S,
         labels={"type": "object", "additionalProperties": S}, annotations={"type": "object", "additionalProperties": S})  # fmt: skip
QUANTITY = s(pattern="^([0-9]+|[0-9]+\\.[0-9]+)(m|Ki|Mi|Gi|k|M|G)?$")
PROBE = o(
    httpGet=o("path port", path=S, port={"anyOf": [i(1, 65535), S]}),
    initialDelaySeconds={**I, "format": "int32"},
)
CONTAINER = o("name image", name=S, image=S, args=a(S), ports=a(o("containerPort", containerPort=i(1, 65535),
    protocol=e("TCP", "UDP", "SCTP"))), env=a(o("name", name=S, value=S)), resources=o(limits={"type": "object",
    "additionalProperties": QUANTITY}), livenessProbe=PROBE, imagePullPolicy=e("Always", "Never", "IfNotPresent"))  # fmt: skip


def resource(kind: str, spec: Schema, version: str = "v1") -> Schema:
    return o("apiVersion kind metadata", apiVersion=e(version), kind=e(kind), metadata=META, spec=spec)


SELECTOR = o(matchLabels={"type": "object", "additionalProperties": S}, matchExpressions=a(o("key operator", key=S,
    operator=e("In", "NotIn", "Exists"), values=a(S))))  # fmt: skip
TEMPLATE = o("spec", metadata=META, spec=o("containers", containers=a(CONTAINER, minItems=1), nodeName=S,
    restartPolicy=e("Always", "OnFailure", "Never")))  # fmt: skip
CLUSTER = [
    resource("Pod", TEMPLATE["properties"]["spec"]), resource("Service", o("ports", ports=a(o("port", port=i(1, 65535),
      targetPort={"anyOf": [I, S]}, nodePort=i(30000, 32767))), type=e("ClusterIP", "NodePort", "LoadBalancer"),
      selector={"type": "object", "additionalProperties": S})),
    resource("Deployment", o("selector template", replicas=i(0, 1000), selector=SELECTOR, template=TEMPLATE,
      strategy=o(type=e("Recreate", "RollingUpdate"), rollingUpdate=o(maxSurge={"anyOf": [i(0), s(pattern="^[0-9]+%$")]}))), "apps/v1"),
    resource("ConfigMap", o()), resource("Namespace", o(finalizers=a(S))), resource("Job", o("template", template=TEMPLATE,
      backoffLimit=i(0, 100), completions=i(0)), "batch/v1"), resource("CronJob", o("schedule jobTemplate", schedule=s(pattern=
      "^(\\S+\\s+){4}\\S+$"), jobTemplate=o("spec", spec=o(template=TEMPLATE)), suspend=B), "batch/v1"),
    resource("Ingress", o("rules", rules=a(o("host", host=s(format="hostname"), http=o("paths", paths=a(o("path pathType",
      path=S, pathType=e("Exact", "Prefix"))))))), "networking.k8s.io/v1"),
    resource("Secret", o()), resource("PersistentVolumeClaim", o("accessModes", accessModes=a(e("ReadWriteOnce",
      "ReadOnlyMany", "ReadWriteMany"), uniqueItems=True), resources=o(requests=o("storage", storage=QUANTITY)))),
    resource("Role", o("rules", rules=a(o("verbs", apiGroups=a(S), resources=a(S), verbs=a(S, minItems=1)))), "rbac/v1"),
    resource("HorizontalPodAutoscaler", o("maxReplicas", minReplicas=i(1), maxReplicas=i(1), metrics=a({"oneOf": [o(
      "type resource", type={"const": "Resource"}, resource=o("name", name=S)), o("type pods", type={"const": "Pods"},
      pods=ANY)]})), "autoscaling/v2"),
    resource("NetworkPolicy", o("podSelector", podSelector=SELECTOR, ingress=a(o(from_=a(o(ipBlock=o("cidr", cidr=s(pattern=
      "^\\d{1,3}(\\.\\d{1,3}){3}/\\d{1,2}$"))))))), "networking.k8s.io/v1"),
    resource("StatefulSet", o("serviceName template", serviceName=S, template=TEMPLATE, replicas=i(0)), "apps/v1"),
    resource("ServiceAccount", o(automountServiceAccountToken=B)),
]  # fmt: skip

ELEMENTS: list[Schema] = [
    o("type content", type={"const": "text"}, content=S), o("type url", type={"const": "image"}, url=URI, caption=S, width=i(0)),
    o("type items", type={"const": "list"}, items=a(S, minItems=1)), o("type content level", type={"const": "header"},
      content=S, level=i(1, 6)), o("type content", type={"const": "quote"}, content=S, citation=S),
]  # fmt: skip
STORY_PARTS = o("type version", type=s(enum=["story"]), version=s(pattern="^0\\.10\\.\\d+$"), _id=s(pattern="^[A-Z0-9]{26}$"),
    canonical_url=s(format="uri-reference"), created_date=TIME, headlines=o(basic=S, mobile=maybe(S)), credits=o(by=a(o("name",
    name=S, type=e("author"), url=URI))), taxonomy=o(tags=a(o(text=S, slug=s(pattern="^[a-z0-9-]+$")))), language=s(pattern=
    "^[a-z]{2}(-[A-Z]{2})?$"), distributor=o("category", category=e("staff", "wires", "freelance"), name=S))  # fmt: skip
ARTICLES = [
    {"$schema": draft, **STORY_PARTS, "properties": {**STORY_PARTS["properties"], "content_elements": a({key: ELEMENTS[:n]})}}
    for draft, key, n in product((DRAFT4.replace("-04", "-07"), DRAFT2020), ("anyOf", "oneOf"), (2, 3, 5))
] + [
    {"$schema": DRAFT4, **closed("type", type=e("video", "gallery"), streams=a(closed("url", url=URI, height=i(0), bitrate={
     "type": "number", "minimum": 0, "exclusiveMinimum": True})), duration=i(0))},
    {**o("content_elements", content_elements=a(ref("any"))), "$defs": {"any": {"oneOf": [ref("text"), ref("group")]},
     "text": closed("type text", type={"const": "text"}, text=S), "group": closed("type children", type={"const": "group"},
     children=a(ref("any")))}},
    {"allOf": [STORY_PARTS, {"properties": {"revision": o("revision_id", revision_id=S, published=B)}}]},
]  # fmt: skip


def event(name: str, /, **fields: Any) -> Schema:
    address = "http://iglucentral.com/schemas/com.snowplowanalytics.self-desc/schema/jsonschema/1-0-0#"
    self_ = {"vendor": "org.example", "name": name, "format": "jsonschema", "version": "1-0-0"}
    return {
        "$schema": address,
        "description": f"Event: {name}",
        "self": self_,
        **closed(" ".join(list(fields)[:1]), **fields),
    }


def text(length: int) -> Schema:
    return {"type": ["string", "null"], "maxLength": length}


EVENTS = [
    event("link_click", targetUrl=s(minLength=1), elementId=S, elementClasses=a(S), elementTarget=S),
    event("add_to_cart", sku=s(maxLength=255), name=text(255), unitPrice={"type": ["number", "null"]}, quantity=i(0, 32767)),
    event("page_ping", id={"type": "string", "format": "uuid"}, minXOffset=i(0, 2147483647), maxXOffset=i(0, 2147483647)),
    event("geolocation", latitude={"type": "number", "minimum": -90, "maximum": 90}, longitude={"type": "number",
      "minimum": -180, "maximum": 180}, accuracy={"type": ["number", "null"]}),
    event("mobile_context", osType=S, osVersion=S, deviceModel=S, carrier=text(128), networkType=e("mobile", "wifi", "offline")),
    event("consent_given", basis=e("contract", "consent", "legal"), documents=a(closed("id version", id=s(maxLength=36),
      version=s(maxLength=36)), minItems=1), expiry={"type": ["string", "null"], "format": "date-time"}),
    event("form_submit", formId=S, elements=a(closed("name nodeName", name=S, value={"type": ["string", "null"]},
      nodeName=e("INPUT", "TEXTAREA", "SELECT")))), event("timing", category=S, variable=S, timing=N, label=S),
    event("site_search", terms=a(s(maxLength=512), minItems=1), totalResults={**I, "minimum": 0}, filters=ANY),
    event("ip_seen", ip={"anyOf": [s(format="ipv4"), s(format="ipv6")]}, seen=TIME),
    event("media_state", currentTime={"type": "number", "minimum": 0}, volume=i(0, 100), ended=B, muted=B,
      playbackRate={"type": "number", "multipleOf": 0.25, "maximum": 4}), event("checkout_step", step=i(1, 10), shipping=text(128)),
    event("web_vitals", cls={"type": ["number", "null"]}, lcp={"type": ["number", "null"]}, navigationType=text(64)),
    event("login", method=e("password", "sso", "passkey"), success=B, attempts=i(1, 99)),
]  # fmt: skip

STORE = [
    {"$schema": DRAFT4, "id": "https://example.org/feed", **o("version title items", version=s(format="uri"), title=S,
      items=a(o("id", id=S, url=s(format="uri"), content_text=S, date_published=s(format="date-time"), tags=a(S))))},
    {"$schema": DRAFT7, "type": "object", "definitions": {"color": s(pattern="^#[0-9A-Fa-f]{3,8}$"), "style": {"type": "object",
      "properties": {"fill": ref("color", "definitions"), "width": {"type": "number", "minimum": 0}}}}, "properties": {
      "styles": {"type": "object", "additionalProperties": ref("style", "definitions")}}},
    {"$schema": DRAFT7, "type": "object", "properties": {"type": e("FeatureCollection"), "features": a(o("type geometry",
      type=e("Feature"), geometry={"oneOf": [NULL, o("type coordinates", type=e("Point"), coordinates=a(N, minItems=2,
      maxItems=3)), o("type coordinates", type=e("LineString"), coordinates=a(a(N, minItems=2), minItems=2))]},
      properties={"oneOf": [NULL, ANY]}))}, "required": ["type", "features"]},
    {"$schema": DRAFT2019, **o("openapi info paths", openapi=s(pattern="^3\\.1\\.\\d+$"), info=o("title version", title=S,
      version=S), paths={"type": "object", "patternProperties": {"^/": ref("path")}, "unevaluatedProperties": False}),
      "$defs": {"path": {"type": "object", "properties": {"get": ref("op"), "post": ref("op")}}, "op": o("responses",
      operationId=S, responses={"type": "object", "patternProperties": {"^[1-5](?:[0-9]{2}|XX)$": o("description",
      description=S)}, "propertyNames": {"pattern": "^(default|[1-5].*)$"}})}},
    {"$schema": DRAFT7, "allOf": [{"type": "object", "properties": {"kind": S}, "required": ["kind"]}, {"if": {"properties": {
      "kind": {"const": "http"}}}, "then": {"properties": {"url": URI}, "required": ["url"]}}, {"if": {"properties": {"kind": {
      "const": "cron"}}}, "then": {"properties": {"every": i(1)}, "required": ["every"]}}]},
    {"$schema": DRAFT2020, **o("name", name=S), "unevaluatedProperties": False, "allOf": [{"properties": {"age": i(0)}},
      {"anyOf": [{"properties": {"mail": EMAIL}, "required": ["mail"]}, {"properties": {"phone": S}, "required": ["phone"]}]}]},
    closed("jsonrpc method id", jsonrpc={"const": "2.0"}, method=s(pattern="^[a-z]+/[a-zA-Z]+$"), params={"oneOf": [a({}), ANY]},
      id={"anyOf": [I, S, NULL]}), {"oneOf": [closed("result", result={}), closed("error", error=closed("code message",
      code=I, message=S, data={}))]}, o("bomFormat components", bomFormat=e("CycloneDX"), serialNumber=s(pattern=
      "^urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"), version=i(1), components=a(o("type name",
      type=e("library", "application"), name=S, hashes=a(closed("alg content", alg=e("SHA-1", "SHA-256"), content=s(pattern=
      "^([a-fA-F0-9]{40}|[a-fA-F0-9]{64})$"))), licenses=a(S, uniqueItems=True)))),
    closed("resources", resources={"type": "object", "minProperties": 1, "additionalProperties": o("Type", Type=s(pattern=
      "^[A-Z][A-Za-z0-9]*(::[A-Z][A-Za-z0-9]*){2}$"), Properties=ANY, DependsOn={"anyOf": [S, a(S)]})}),
    o(name=S, version=s(pattern="^(0|[1-9]\\d*)\\.(0|[1-9]\\d*)\\.(0|[1-9]\\d*)(-[0-9A-Za-z.-]+)?$"), engines=o(node=S),
      manifest_version=e(2, 3), permissions=a(S), icons={"type": "object", "patternProperties": {"^[1-9][0-9]*$": S},
      "additionalProperties": False}), {"$schema": DRAFT7, "type": "array", "items": [e("rule"), ANY], "minItems": 2,
      "additionalItems": False}, {"$schema": DRAFT2020, "type": "array", "prefixItems": [S, N, B], "items": False},
    {"$schema": DRAFT2020, "type": "array", "contains": o("main", main={"const": True}), "items": o("name", name=S, main=B),
      "minItems": 1}, {"not": {"type": "object", "required": ["secret"]}, "type": "object", "properties": {"open": S}},
    {"$recursiveAnchor": True, "$schema": DRAFT2019, "type": "object", "properties": {"items": a({"$recursiveRef": "#"}),
      "name": S}}, {"$id": "https://example.org/tree", "$dynamicAnchor": "node", "type": "object", "properties": {"data": {},
      "children": a({"$dynamicRef": "#node"})}},
    {"type": "object", "properties": {"filter": ref("filter")}, "$defs": {"filter": {"anyOf": [closed("and", **{"and": a(
      ref("filter"), minItems=1)}), closed("or", **{"or": a(ref("filter"), minItems=1)}), closed("not", **{"not": ref(
      "filter")}), closed("field op value", field=S, op=e("=", "<", ">", "in"), value={})]}}},
    o(weekdays=a(e("mo", "tu", "we", "th", "fr", "sa", "su"), uniqueItems=True, minItems=1), hours=a(i(0, 23), uniqueItems=True)),
    {"type": "object", "additionalProperties": {"$ref": "#"}}, o("price", price={"type": "number", "multipleOf": 0.05, "minimum": 0}),
]  # fmt: skip

PLAIN = [
    S, I, N, B, NULL, ANY, {}, {"type": "array"}, {"type": ["string", "null"]}, e("yes", "no"), {"const": "ok"},
    i(0, 9), i(-5), s(minLength=1), s(maxLength=280), s(pattern="^[a-z]+$"), DATE, TIME, EMAIL, URI, UUID,
    s(format="time"), s(format="duration"), s(format="hostname"), s(format="json-pointer"), a(S), a(I, minItems=1, maxItems=3),
    a(a(N)), {"type": "object", "additionalProperties": S}, {"type": "object", "additionalProperties": False},
    maybe(I), {"type": "number", "minimum": 0, "exclusiveMaximum": 1}, {"type": "integer", "multipleOf": 3},
    s(contentEncoding="base64"), {"$ref": "#/definitions/x", "definitions": {"x": B}}, {"allOf": [i(0), i(None, 5)]},
]  # fmt: skip

# The kinds that differ by how their writers use a schema: with a version, closed, with every property required.
_BASE = [*CALLS, *CONFIGS, *CLUSTER, *ARTICLES, *EVENTS, *STORE, *PLAIN]


def _answer(schema: Schema) -> Schema:
    """A schema as part of an answer with a status, its definitions moved along."""
    inner = {key: value for key, value in schema.items() if key not in {"$defs", "definitions", "$schema"}}
    outer = {key: value for key, value in schema.items() if key in {"$defs", "definitions", "$schema"}}
    return {**outer, **closed("status", status=e("ok", "failed"), result=inner)}


_SPARE = [
    schema
    for schema in _BASE
    if schema.get("properties") and not {"$id", "id", "$recursiveAnchor"} & schema.keys()
]
CORPUS: list[Schema] = [*_BASE, *(_answer(schema) for schema in _SPARE)][:200]
