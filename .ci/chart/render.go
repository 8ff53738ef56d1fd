// Renders a chart with Go's templates and Sprig's functions, which are what Helm's are made of. It is not Helm: there are
// no dependencies, a chart that needs them fails here; hooks are rendered like everything else, and lookup finds nothing, as
// without a cluster. KUBE_VERSION is the version of the API server, which then has the kinds that servers of that version have.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"gopkg.in/yaml.v3"
)

// What an API server knows, as Helm gives it to templates.
type versions []string

func (v versions) Has(wanted string) bool {
	for _, one := range v {
		if one == wanted {
			return true
		}
	}
	return false
}

func main() {
	chart, release, namespace := os.Args[1], os.Args[2], os.Args[3]
	values, about := load(filepath.Join(chart, "values.yaml")), load(filepath.Join(chart, "Chart.yaml"))
	for _, more := range os.Args[4:] {
		merge(values, load(more))
	}
	folder := filepath.Join(chart, "templates")
	var files []string
	must(filepath.Walk(folder, func(path string, info os.FileInfo, err error) error {
		if err == nil && !info.IsDir() {
			path, err = filepath.Rel(folder, path)
			files = append(files, path)
		}
		return err
	}))
	all := template.New("chart").Option("missingkey=error")
	functions := sprig.TxtFuncMap()
	functions["toYaml"] = func(value interface{}) string {
		var text bytes.Buffer
		encoder := yaml.NewEncoder(&text)
		encoder.SetIndent(2)
		must(encoder.Encode(value))
		return strings.TrimSuffix(text.String(), "\n")
	}
	functions["include"] = func(name string, data interface{}) (string, error) {
		var text bytes.Buffer
		err := all.ExecuteTemplate(&text, name, data)
		return text.String(), err
	}
	functions["fromJson"] = func(text string) (value map[string]interface{}, err error) {
		err = json.Unmarshal([]byte(text), &value)
		return value, err
	}
	functions["fromJsonArray"] = func(text string) (value []interface{}, err error) {
		err = json.Unmarshal([]byte(text), &value)
		return value, err
	}
	functions["lookup"] = func(version, kind, namespace, name string) map[string]interface{} {
		return map[string]interface{}{}
	}
	all.Funcs(functions)
	for _, file := range files {
		text, err := os.ReadFile(filepath.Join(folder, file))
		must(err)
		_, err = all.New(file).Parse(string(text))
		must(err)
	}
	data := map[string]interface{}{
		"Values":  values,
		"Chart":   map[string]interface{}{"Name": about["name"], "Version": about["version"], "AppVersion": about["appVersion"]},
		"Capabilities": map[string]interface{}{
			"APIVersions": versions{"v1", "apps/v1", "admissionregistration.k8s.io/v1"},
			"KubeVersion": map[string]interface{}{"Version": kubeVersion()},
		},
		"Release": map[string]interface{}{"Name": release, "Namespace": namespace, "Service": "Helm"},
	}
	for _, file := range files {
		if strings.HasPrefix(filepath.Base(file), "_") {
			continue
		}
		var text bytes.Buffer
		must(all.ExecuteTemplate(&text, file, data))
		manifest := strings.Trim(text.String(), "\n")
		switch {
		// Its text is for the eye; that it can be made is enough.
		case file == "NOTES.txt":
		case strings.TrimSpace(manifest) != "" && wanted(file):
			fmt.Printf("---\n%s\n", manifest)
		}
	}
}

func kubeVersion() string {
	if version := os.Getenv("KUBE_VERSION"); version != "" {
		return version
	}
	return "v1.33.0"
}

// Whether a template is asked for: TEMPLATES is how its path begins, of several words one, or with a ! how it does not.
func wanted(file string) bool {
	prefix := os.Getenv("TEMPLATES")
	if strings.HasPrefix(prefix, "!") {
		return !strings.HasPrefix(file, prefix[1:])
	}
	for _, word := range strings.Fields(prefix) {
		if strings.HasPrefix(file, word) {
			return true
		}
	}
	return prefix == ""
}

func load(path string) map[string]interface{} {
	text, err := os.ReadFile(path)
	must(err)
	values := map[string]interface{}{}
	must(yaml.Unmarshal(text, &values))
	return values
}

// Maps key by key; everything else is replaced.
func merge(into, from map[string]interface{}) {
	for key, value := range from {
		below, isMap := value.(map[string]interface{})
		present, wasMap := into[key].(map[string]interface{})
		if isMap && wasMap {
			merge(present, below)
		} else {
			into[key] = value
		}
	}
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "render:", err)
		os.Exit(1)
	}
}
