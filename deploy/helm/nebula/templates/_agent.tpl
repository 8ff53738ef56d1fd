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
  {{- if include "nebula.hasExportFiles" .root }}
  # A Secret that changes is read again.
  - name: export
    mountPath: /etc/nebula-cni-export
    readOnly: true
  {{- end }}
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
{{- if not .proof }}
    # Once it is gone, an uninstallation asks the runtime.
    optional: true
{{- end }}
{{- if .proof }}
{{ include "nebula.proof" . }}
{{- if include "nebula.hasExportFiles" .root }}
{{- with .root.Values.agent.flows.export.otlp }}
- name: export
  projected:
    defaultMode: 256
    sources:
      {{- with .headersSecret }}
      - secret:
          name: {{ . }}
          items: [{key: headers, path: headers}]
      {{- end }}
      {{- with .caConfigMap }}
      - configMap:
          name: {{ . }}
          items: [{key: ca.crt, path: ca.crt}]
      {{- end }}
{{- end }}
{{- end }}
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

{{- /* Not empty if agents have rights to change pods or nodes. The leader's Lease shows that the taint was on, which agents then
take back. */ -}}
{{- define "nebula.agentChangesObjects" -}}
{{- if and .Values.agent.enabled (or (eq .Values.agent.unprotected "label") (include "nebula.agentTaints" .) (include "nebula.agentWritesCondition" .)) }}true{{ end }}
{{- end }}

{{- define "nebula.agentWritesCondition" -}}
{{- include "nebula.settle" . }}
{{- if and .Values.capture.enabled .Values.policy.enabled .Values.policy.condition }}true{{ end }}
{{- end }}

{{- define "nebula.agentTaints" -}}
{{- if or .Values.agent.taint (lookup "coordination.k8s.io/v1" "Lease" .Release.Namespace "nebula-cni-agent-leader") }}true{{ end }}
{{- end }}

{{- /* Not empty if the API server has ValidatingAdmissionPolicies. Without a cluster Helm knows versions of groups only. */ -}}
{{- define "nebula.hasAdmissionPolicies" -}}
{{- if or (.Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy") (semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version) }}true{{ end }}
{{- end }}

{{- define "nebula.isAgent" -}}
- name: is-an-agent
  expression: "request.userInfo.username == 'system:serviceaccount:{{ .Release.Namespace }}:nebula-cni-agent'"
{{- end }}

{{- define "nebula.agentNode" -}}
# The node that the token is bound to, as servers say since 1.30 unless that is turned off.
- name: node
  expression: >-
    has(request.userInfo.extra) && 'authentication.kubernetes.io/node-name' in request.userInfo.extra
    ? request.userInfo.extra['authentication.kubernetes.io/node-name'][0] : ''
{{- end }}

{{- define "nebula.bothMetadata" -}}
# What the API server itself keeps in the metadata.
- name: bookkeeping
  expression: "['managedFields', 'resourceVersion', 'generation']"
- name: metadata
  expression: dyn(object.metadata)
- name: oldMetadata
  expression: dyn(oldObject.metadata)
{{- end }}

{{- /* Called with a dict: about, name. */ -}}
{{- define "nebula.binding" }}
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ .name }}
  labels:
    {{- include "nebula.labels" .about | nindent 4 }}
spec:
  policyName: {{ .name }}
  validationActions: [Deny]
{{- end }}
