{{- /* Called with a dict: root, name. */ -}}
{{- define "nebula.selector" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{- define "nebula.labels" -}}
{{ include "nebula.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end }}

{{- define "nebula.image" -}}
{{- with .root.Values.image.registry }}{{ . | trimSuffix "/" }}/{{ end -}}
{{ .name }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- if .root.Values.image.registry }}{{ with index (.root.Values.image.digests | default dict) .name }}@{{ . }}{{ end }}{{ end }}
{{- end }}

{{- define "nebula.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- /* What a container without any right of its own gets: the Pod Security level `restricted`. */ -}}
{{- define "nebula.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- /* What agents and lighthouses prove themselves to the CA with, and what they know it by. The keys are named, so that a pod
waits until the CA has written them, instead of for a minute with an empty folder. */ -}}
{{- define "nebula.proof" -}}
- name: token
  projected:
    sources:
      - serviceAccountToken:
          audience: nebula-ca
          expirationSeconds: 3600
          path: token
- name: trust
  configMap:
    name: nebula-trust
    items:
      - key: tls.crt
        path: tls.crt
      - key: ca.crt
        path: ca.crt
{{- end }}

{{- define "nebula.proofMounts" -}}
- name: token
  mountPath: /var/run/secrets/nebula-ca
  readOnly: true
- name: trust
  mountPath: /var/run/nebula-trust
  readOnly: true
{{- end }}
