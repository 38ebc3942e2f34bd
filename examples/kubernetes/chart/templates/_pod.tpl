{{- define "quire.secure" -}}
{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
{{- end }}

{{- define "quire.pod" -}}
terminationGracePeriodSeconds: 45
enableServiceLinks: false
securityContext: {runAsNonRoot: true, runAsUser: 10001, fsGroup: 10001, seccompProfile: {type: RuntimeDefault}}
{{- end }}

{{/* A server: (dict "values" $.Values "role" ROLE "part" ITS-VALUES) */}}
{{- define "quire.server" -}}
automountServiceAccountToken: false
{{ include "quire.pod" . }}
containers:
  - name: serve
    image: {{ .values.image }}
    args:
      - serve
      - {{ .values.model }}
      - --host=0.0.0.0
      - --port=8000
      - --memory={{ .part.memoryMi }}MiB
      - --kv-tiers=remote=quire-kv:7070:/etc/quire/key/kv.key,role={{ .role }}
      {{- range .part.args }}
      - {{ . }}
      {{- end }}
    ports: [{name: http, containerPort: 8000}]
    startupProbe: {httpGet: {path: /health/ready, port: http}, periodSeconds: 1, failureThreshold: 600}
    readinessProbe: {httpGet: {path: /health/ready, port: http}, periodSeconds: 2}
    livenessProbe: {httpGet: {path: /health/live, port: http}, periodSeconds: 10}
    resources:
      requests: {cpu: {{ .part.cpu | quote }}, memory: {{ add .part.memoryMi 128 }}Mi}
      limits: {cpu: {{ .part.cpu | quote }}, memory: {{ add .part.memoryMi 128 }}Mi}
    securityContext: {{ include "quire.secure" . }}
    volumeMounts:
      - {name: key, mountPath: /etc/quire/key}
      - {name: scratch, mountPath: /data}
      - {name: scratch, mountPath: /tmp}
volumes:
  - {name: key, secret: {secretName: {{ .values.kvKeySecret }}}}
  - {name: scratch, emptyDir: {}}
{{- end }}
