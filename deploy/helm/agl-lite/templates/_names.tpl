{{- define "agl.name" -}}
{{- /* Of a Service too, which may have no dot and, on older clusters, no digit at its start. */ -}}
{{- $name := .Release.Name | replace "." "-" -}}
{{- if regexMatch "^[0-9]" $name }}{{ $name = printf "agl-%s" $name }}{{ end -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- define "agl.labels" -}}
app.kubernetes.io/name: agl-lite
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end -}}
{{- define "agl.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- define "agl.secret" -}}
{{- .Values.existingSecret | default (printf "%s-keys" (include "agl.name" .)) -}}
{{- end -}}
{{- define "agl.agentNamespace" -}}
{{- .Values.agents.namespace | default .Release.Namespace -}}
{{- end -}}
{{- define "agl.instance" -}}
{{- .Values.agents.instance | default (include "agl.name" .) -}}
{{- end -}}
{{- define "agl.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}
{{- define "agl.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}
