{{- define "nebula-ca.labels" -}}
app.kubernetes.io/name: nebula-ca
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
{{- define "nebula-ca.selector" -}}
app.kubernetes.io/name: nebula-ca
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "nebula-ca.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
