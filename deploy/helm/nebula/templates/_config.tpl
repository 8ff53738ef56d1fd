{{- /* What values mean that follow from others. Each template that reads them includes it first; it makes no text. */ -}}
{{- define "nebula.settle" -}}
{{- if .Values.network.primary.enabled }}
  {{- if not .Values.agent.enabled }}{{ fail "network.primary.enabled needs agent.enabled: the agent writes the network's configuration" }}{{ end }}
  {{- $_ := set .Values.capture "enabled" true }}
  {{- if eq (join "," .Values.network.overlay) "10.77.0.0/16" }}
    {{- $_ := set .Values.network "overlay" (list "10.244.0.0/16") }}
    {{- if eq (join "," .Values.network.reserved) "10.77.254.0/24" }}{{ $_ := set .Values.network "reserved" (list "10.244.254.0/24") }}{{ end }}
    {{- if eq .Values.lighthouse.network "10.77.255.0/24" }}{{ $_ := set .Values.lighthouse "network" "10.244.255.0/24" }}{{ end }}
  {{- end }}
{{- end }}
{{- end }}

{{- /* Where the CA is, as arguments of nebula-enrol. Without another network plugin the cluster's DNS begins to work only after the
pods' network does: the Service is reached by its address, which Kubernetes puts there as tcp://ADDRESS:PORT. */ -}}
{{- define "nebula.caArgs" -}}
- -ca-url
{{- if and .Values.network.primary.enabled .Values.ca.enabled }}
- $(NEBULA_CA_PORT)
- -tls-name
- nebula-ca.{{ .Release.Namespace }}.svc
{{- else }}
- {{ include "nebula.caUrl" . }}
{{- end }}
- -tls-ca
- /var/run/nebula-trust/tls.crt
- -token-file
- /var/run/secrets/nebula-ca/token
{{- end }}

{{- /* Tolerations of what must run before a node has a network, with those of the values. */ -}}
{{- define "nebula.earlyTolerations" -}}
{{- $early := list }}
{{- if .root.Values.network.primary.enabled }}
  {{- range list "node.kubernetes.io/not-ready" "node.kubernetes.io/network-unavailable" }}
    {{- $early = append $early (dict "key" . "operator" "Exists") }}
  {{- end }}
{{- end }}
{{- with concat $early .tolerations }}
tolerations:
  {{- . | toYaml | nindent 2 }}
{{- end }}
{{- end }}

{{- /* The gateway's config.yml but for its routes, which the agent adds. */ -}}
{{- define "nebula.gatewayConfig" -}}
{{- $any := dict "port" "any" "proto" "any" "local_cidr" "any" }}
{{- $config := dict
  "pki" (dict "enrolment" "/run/nebula/enrolment.json")
  "listen" (dict "host" "::" "port" (int .Values.gateway.port))
  "punchy" (dict "punch" true)
  "tun" (dict "dev" .Values.gateway.device "mtu" (int .Values.network.mtu))
  "daemon" (dict "watch_files" "1s")
  "stats" (dict "type" "prometheus" "listen" .Values.gateway.statusListen "path" "/metrics" "namespace" "nebula" "interval" "10s")
  "firewall" (dict "outbound" (list (merge (dict "host" "any") $any)) "inbound" (list (merge (dict "group" "node") $any))) }}
{{- if and .Values.lighthouse.enabled .Values.lighthouse.relay }}
  {{- $_ := set $config "relay" (dict "relays" (include "nebula.lighthouseAddresses" . | fromJsonArray)) }}
{{- end }}
{{- $config | toJson }}
{{- end }}

{{- /* Contents of policy.jsonc. */ -}}
{{- define "nebula.policy" -}}
{{- include "nebula.settle" . }}
{{- $namespace := .Release.Namespace }}
{{- $policy := deepCopy .Values.ca.policy }}
{{- $reserved := .Values.network.reserved }}
{{- if .Values.lighthouse.enabled }}
  {{- /* A network as a whole, so that more replicas need no change; of a first address those that are in use. */ -}}
  {{- if contains "/" .Values.lighthouse.network }}
    {{- $reserved = append $reserved .Values.lighthouse.network | uniq }}
  {{- else }}
    {{- $reserved = concat $reserved (include "nebula.lighthouseAddresses" . | fromJsonArray) | uniq }}
  {{- end }}
  {{- $lighthouses := dict "account" (printf "%s/nebula-lighthouse" $namespace) "network" .Values.lighthouse.network "port" (int .Values.lighthouse.port) }}
  {{- $policy = mergeOverwrite (dict "lighthouses" $lighthouses) $policy }}
{{- end }}
{{- if .Values.network.primary.enabled }}
  {{- $policy = mergeOverwrite (dict "gateways" (dict "account" (printf "%s/nebula-gateway" $namespace))) $policy }}
{{- end }}
{{- with .Values.network.lighthouses }}
  {{- $policy = mergeOverwrite (dict "hosts" (dict "lighthouses" .)) $policy }}
{{- end }}
{{- $pods := dict "overlay" .Values.network.overlay "reserved" $reserved }}
{{- $kubernetes := dict "node_account" (printf "%s/nebula-cni-agent" $namespace) "audience" "nebula-ca" "trust_config_map" (printf "%s/nebula-trust" $namespace) }}
{{- if .Values.ca.revocation.enabled }}{{ $_ := set $kubernetes "revocation" true }}{{ end }}
{{- /* Where the agents are of another release, its values say who is enrolled. */ -}}
{{- $own := dig "pods" (dict) .Values.ca.policy }}
{{- if and .Values.agent.enabled (not (hasKey $own "namespaces")) (not (hasKey $own "except_namespaces")) }}
  {{- $enrol := include "nebula.enrol" . | fromJson }}
  {{- if hasKey .Values.agent.entry "enrol" }}{{ $enrol = .Values.agent.entry.enrol }}{{ end }}
  {{- if hasKey $enrol "namespaces" }}
    {{- $_ := set $pods "namespaces" $enrol.namespaces }}
  {{- else if hasKey $enrol "exceptNamespaces" }}
    {{- $_ := set $pods "except_namespaces" $enrol.exceptNamespaces }}
  {{- end }}
{{- end }}
{{- $policy = mergeOverwrite (dict "kubernetes" $kubernetes "pods" $pods) $policy }}
{{- /* Whatever ca.policy says: "pool" is there by default. */ -}}
{{- if .Values.capture.enabled }}{{ $_ := set $policy.pods "address" "same" }}{{ end }}
{{- $policy | toPrettyJson }}
{{- end }}

{{- /* How nodes reach the CA: a URL, or its Service, whose address the agent looks up. */ -}}
{{- define "nebula.caOfNodes" -}}
{{- if .Values.ca.enabled }}
{{- dict "service" (printf "%s/nebula-ca" .Release.Namespace) "port" (int .Values.ca.service.port) | toJson }}
{{- else }}
{{- $ca := dict "url" .Values.ca.external.url }}
{{- with .Values.ca.external.serverName }}{{ $_ := set $ca "serverName" . }}{{ end }}
{{- $ca | toJson }}
{{- end }}
{{- end }}

{{- /* How pods reach it. */ -}}
{{- define "nebula.caUrl" -}}
{{- if .Values.ca.enabled -}}
https://nebula-ca.{{ .Release.Namespace }}.svc:{{ .Values.ca.service.port }}
{{- else -}}
{{ .Values.ca.external.url }}
{{- end }}
{{- end }}

{{- /* Overlay addresses of the lighthouses, as a JSON list: the CA counts them from the first address of the network, or from
that address if it is one. */ -}}
{{- define "nebula.lighthouseAddresses" -}}
{{- include "nebula.settle" . }}
{{- $octets := regexFind "^[0-9.]+" .Values.lighthouse.network | splitList "." }}
{{- $first := index $octets 3 | int }}
{{- if contains "/" .Values.lighthouse.network }}{{ $first = add1 $first }}{{ end }}
{{- $addresses := list }}
{{- range until (int .Values.lighthouse.replicas) }}
  {{- $addresses = append $addresses (printf "%s.%d" (slice $octets 0 3 | join ".") (add $first .)) }}
{{- end }}
{{- $addresses | toJson }}
{{- end }}

{{- /* Which pods are enrolled. */ -}}
{{- define "nebula.enrol" -}}
{{- if and .Values.enrol.namespaces .Values.enrol.exceptNamespaces }}
  {{- fail "give enrol.namespaces or enrol.exceptNamespaces, not both" }}
{{- end }}
{{- range list "kube-system" .Release.Namespace }}
  {{- if has . $.Values.enrol.namespaces }}
    {{- fail (printf "enrol.namespaces names %s: the cluster's DNS and the CA must start before any pod can be enrolled" .) }}
  {{- end }}
{{- end }}
{{- $enrol := dict "namespaces" .Values.enrol.namespaces }}
{{- if .Values.enrol.exceptNamespaces }}
  {{- $enrol = dict "exceptNamespaces" (concat (list "kube-system" .Release.Namespace) .Values.enrol.exceptNamespaces | uniq) }}
{{- end }}
{{- if .Values.enrol.optOut }}{{ $_ := set $enrol "optOut" true }}{{ end }}
{{- $enrol | toJson }}
{{- end }}

{{- /* The chain entry but for `type`, `ca` and `stateDir`, which the agent adds. */ -}}
{{- define "nebula.entry" -}}
{{- include "nebula.settle" . }}
{{- $nebula := dict "punchy" (dict "punch" true) "tun" (dict "mtu" (int .Values.network.mtu)) "firewall" .Values.network.firewall }}
{{- if and .Values.lighthouse.enabled .Values.lighthouse.relay }}
  {{- $_ := set $nebula "relay" (dict "relays" (include "nebula.lighthouseAddresses" . | fromJsonArray)) }}
{{- end }}
{{- if not .Values.ca.enabled }}
  {{- with .Values.network.lighthouses }}
    {{- $_ := set $nebula "static_host_map" . }}
    {{- $_ := set $nebula "lighthouse" (dict "hosts" (keys . | sortAlpha)) }}
  {{- end }}
{{- end }}
{{- $entry := dict
  "overlay" .Values.network.overlay
  "supervisor" .Values.agent.supervisor
  "capabilities" (dict "io.kubernetes.cri.pod-annotations" true "dns" true)
  "nebula" $nebula }}
{{- if .Values.capture.enabled }}
  {{- if eq (join "," .Values.network.overlay) "10.77.0.0/16" }}
    {{- fail "with capture.enabled, network.overlay must be the ranges of the cluster's pods, for example [10.244.0.0/16]" }}
  {{- end }}
  {{- $capture := dict "clear" .Values.capture.clear }}
  {{- range $key := list "services" "loadBalancers" "exclude" "accept" }}
    {{- with index $.Values.capture $key }}{{ $_ := set $capture $key . }}{{ end }}
  {{- end }}
  {{- if ne (toString .Values.capture.nodePorts) "30000-32767" }}{{ $_ := set $capture "nodePorts" .Values.capture.nodePorts }}{{ end }}
  {{- if .Values.policy.enabled }}
    {{- if and .Values.policy.required (ne .Values.policy.clear "enforce") }}
      {{- fail "policy.required needs policy.clear \"enforce\": what the primary network enforces, nobody here can know" }}
    {{- end }}
    {{- $_ := set $capture "policy" (ternary (dict "clear" "enforce") true (eq .Values.policy.clear "enforce")) }}
  {{- end }}
  {{- $_ := set $entry "capture" $capture }}
{{- end }}
{{- with .Values.network.primary }}
  {{- if .enabled }}
    {{- $_ := set $entry "primary" true }}
    {{- if .masquerade }}
      {{- $_ := set $entry "noMasquerade" (concat $.Values.network.overlay .noMasquerade | uniq) }}
    {{- else }}
      {{- $_ := set $entry "ipMasq" false }}
    {{- end }}
    {{- with .mtu }}{{ $_ := set $entry "mtu" (int .) }}{{ end }}
  {{- end }}
{{- end }}
{{- if and .Values.policy.required (has .Values.agent.unprotected (list "label" "report")) }}
  {{- fail "policy.required needs agent.unprotected \"attach\" or \"evict\": pods without a tunnel would go on without their network policies" }}
{{- end }}
{{- if and .Values.policy.required (not (and .Values.capture.enabled .Values.policy.enabled)) }}
  {{- fail "policy.required needs capture.enabled and policy.enabled: without them no pod has its network policies enforced" }}
{{- end }}
{{- /* Selectors in agent.entry stand alone: together with an empty list of namespaces they would select nothing. */ -}}
{{- $enrol := include "nebula.enrol" . | fromJson }}
{{- if not (hasKey .Values.agent.entry "enrol") }}{{ $_ := set $entry "enrol" $enrol }}{{ end }}
{{- mergeOverwrite $entry (deepCopy .Values.agent.entry) | toJson }}
{{- end }}

{{- /* The key `flows` of agent.json: files of the collector are where "nebula.exportMounts" has them. */ -}}
{{- define "nebula.flows" -}}
{{- $flows := omit .Values.agent.flows "export" }}
{{- $export := dict }}
{{- with .Values.agent.flows.export.file }}
  {{- if .path }}{{ $_ := set $export "file" (dict "path" .path "maxMiB" .maxMiB) }}{{ end }}
{{- end }}
{{- with .Values.agent.flows.export.otlp }}
  {{- if .endpoint }}
    {{- $otlp := dict "endpoint" .endpoint }}
    {{- if .headersSecret }}{{ $_ := set $otlp "headersFile" "/etc/nebula-cni-export/headers" }}{{ end }}
    {{- if .caConfigMap }}{{ $_ := set $otlp "caFile" "/etc/nebula-cni-export/ca.crt" }}{{ end }}
    {{- $_ := set $export "otlp" $otlp }}
  {{- else if or .headersSecret .caConfigMap }}
    {{- fail "agent.flows.export.otlp.headersSecret and caConfigMap have no effect without an endpoint" }}
  {{- end }}
{{- end }}
{{- if $export }}
  {{- if not .Values.agent.flows.keep }}{{ fail "agent.flows.export needs agent.flows.keep: what is not kept cannot be exported" }}{{ end }}
  {{- $_ := set $flows "export" $export }}
{{- end }}
{{- $flows | toJson }}
{{- end }}

{{- /* Not empty if the agent needs a file for its collector. */ -}}
{{- define "nebula.hasExportFiles" -}}
{{- with .Values.agent.flows.export.otlp }}{{ if or .headersSecret .caConfigMap }}true{{ end }}{{ end }}
{{- end }}

{{- /* Contents of agent.json. */ -}}
{{- define "nebula.agent" -}}
{{- $agent := dict
  "strategy" .Values.agent.strategy
  "hostRoot" "/host"
  "ca" (include "nebula.caOfNodes" . | fromJson)
  "entry" (include "nebula.entry" . | fromJson)
  "unprotected" .Values.agent.unprotected
  "upgrade" .Values.agent.upgrade
  "flows" (include "nebula.flows" . | fromJson)
  "taint" .Values.agent.taint
  "listen" .Values.agent.listen }}
{{- if and .Values.capture.enabled .Values.policy.enabled }}
  {{- $policy := dict "enabled" true "dns" .Values.policy.dns }}
  {{- range $key := list "required" "condition" }}
    {{- if index $.Values.policy $key }}{{ $_ := set $policy $key true }}{{ end }}
  {{- end }}
  {{- $_ := set $agent "policy" $policy }}
{{- end }}
{{- if not (dig "kubernetes" "node_ranges" true .Values.ca.policy) }}{{ $_ := set $agent "nodeRanges" false }}{{ end }}
{{- if .Values.network.primary.enabled }}
  {{- $_ := set $agent "gateway" (include "nebula.gatewayConfig" . | fromJson) }}
  {{- with .Values.network.primary.nodeSelector }}{{ $_ := set $agent "primaryNodes" . }}{{ end }}
{{- end }}
{{- range $key := list "network" "confDirs" "binDirs" "runtimeEndpoint" }}
  {{- with index $.Values.agent $key }}{{ $_ := set $agent $key . }}{{ end }}
{{- end }}
{{- with .Values.agent.api.port }}{{ $_ := set $agent "api" (dict "listen" (printf "[::]:%d" (int .))) }}{{ end }}
{{- $agent | toPrettyJson }}
{{- end }}

{{- /* Names in the CA's TLS certificate, as arguments of nebula-ca. */ -}}
{{- define "nebula.tlsNames" -}}
{{- $service := printf "nebula-ca.%s.svc" .Release.Namespace }}
{{- range concat (list $service (printf "%s.cluster.local" $service)) .Values.ca.tlsNames }}
- --tls-name={{ . }}
{{- end }}
{{- end }}

{{- /* Contents of a lighthouse's config.yml. */ -}}
{{- define "nebula.lighthouseConfig" -}}
pki:
  # Written by nebula-enrol; the daemon renews it.
  enrolment: /run/nebula/enrolment.json
lighthouse:
  am_lighthouse: true
  {{- with .Values.lighthouse.dns.domain }}
  serve_dns: true
  dns: {host: "::", port: {{ $.Values.lighthouse.dns.port }}, domain: {{ . }}}
  {{- end }}
relay:
  am_relay: {{ .Values.lighthouse.relay }}
  use_relays: false
listen:
  # Both families.
  host: "::"
  port: {{ .Values.lighthouse.port }}
tun:
  # It carries packets of others and has none of its own: no device, no capability.
  disabled: true
stats:
  type: prometheus
  listen: {{ .Values.lighthouse.statusListen }}
  path: /metrics
  namespace: nebula
  interval: 10s
firewall:
  outbound: []
  inbound: []
{{- end }}

{{- /* Port of IP:PORT or [IP]:PORT. */ -}}
{{- define "nebula.portOf" -}}
{{ regexFind "[0-9]+$" . }}
{{- end }}
