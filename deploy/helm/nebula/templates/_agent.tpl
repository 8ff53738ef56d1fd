{{- /* What the pods of the agent and of its uninstallation have in common. */ -}}
{{- define "nebula.agentPod" -}}
serviceAccountName: nebula-cni-agent
{{- include "nebula.pullSecrets" . }}
{{- with .Values.agent.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
# No chain is called for it, so it never waits for itself.
hostNetwork: true
# The API server and the CA are reached by address; the node's resolver works before the cluster's.
dnsPolicy: Default
# It starts instances in the namespaces of the node's first process, so that they are processes of the node.
hostPID: true
enableServiceLinks: false
# Nodes of every kind, also those that are not ready because they have no network yet.
tolerations:
  - operator: Exists
{{- with .Values.agent.nodeSelector }}
nodeSelector:
  {{- . | toYaml | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Called with a dict: root, proof (whether it talks to the CA). */ -}}
{{- define "nebula.agentContainer" -}}
image: {{ include "nebula.image" (dict "root" .root "name" "nebula-cni-agent") }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
env:
  - name: NODE_NAME
    valueFrom:
      fieldRef:
        fieldPath: spec.nodeName
  - name: POD_NAMESPACE
    valueFrom:
      fieldRef:
        fieldPath: metadata.namespace
# It installs programs that the runtime runs as root, makes devices in the namespaces of pods and starts instances outside
# of its own control group: fewer capabilities would be fewer in name only, and SELinux and AppArmor would stand in the way.
securityContext:
  privileged: true
  readOnlyRootFilesystem: true
volumeMounts:
  - name: config
    mountPath: /etc/nebula-cni-agent
    readOnly: true
  {{- if .proof }}
  {{- include "nebula.proofMounts" . | nindent 2 }}
  {{- end }}
  # CNI folders, wherever the distribution has them; namespaces of pods, which are mounts; sockets; state of the plugin; what
  # runtimes remember for DEL.
  - name: root
    mountPath: /host
    mountPropagation: HostToContainer
  # Sockets, and namespaces of pods, under the names that runtimes and the plugin's records have for them.
  - name: run
    mountPath: /run
    mountPropagation: HostToContainer
  - name: netns
    mountPath: /var/run/netns
    mountPropagation: HostToContainer
{{- end }}

{{- define "nebula.agentVolumes" -}}
- name: config
  configMap:
    name: nebula-cni-agent
{{- if .proof }}
{{ include "nebula.proof" . }}
{{- end }}
- name: root
  hostPath:
    path: /
- name: run
  hostPath:
    path: /run
- name: netns
  hostPath:
    path: /run/netns
    type: DirectoryOrCreate
{{- end }}
