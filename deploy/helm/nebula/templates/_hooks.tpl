{{- define "nebula.beforeChanges" -}}
helm.sh/hook: pre-install,pre-upgrade,pre-rollback
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}

{{- define "nebula.preDelete" -}}
helm.sh/hook: pre-delete
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}

{{- /* A pod that runs kubectl once. Called with a dict: root, args. */ -}}
{{- define "nebula.kubectlPod" -}}
metadata:
  labels:
    {{- include "nebula.labels" (dict "root" .root "name" "nebula-uninstall") | nindent 4 }}
spec:
  serviceAccountName: nebula-uninstall
  restartPolicy: OnFailure
  # It starts whatever is wrong with the pods' network, and no runtime remembers that it was made with our chain.
  hostNetwork: true
  {{- include "nebula.pullSecrets" .root | nindent 2 }}
  tolerations:
    - operator: Exists
  securityContext:
    runAsNonRoot: true
    runAsUser: 65532
    runAsGroup: 65532
    seccompProfile:
      type: RuntimeDefault
  containers:
    - name: kubectl
      image: {{ .root.Values.uninstall.kubectlImage }}
      args:
        - --namespace={{ .root.Release.Namespace }}
        # No folder is writable.
        - --cache-dir=/nonexistent
        {{- range .args }}
        - {{ . }}
        {{- end }}
      securityContext:
        {{- include "nebula.restricted" .root | nindent 8 }}
{{- end }}
