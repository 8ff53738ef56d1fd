// Renders a chart with Go's templates and Sprig's functions, which are what Helm's are made of. It is not Helm: there are
// no dependencies, hooks, capabilities or lookups, and a chart that needs them fails here.
package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"gopkg.in/yaml.v3"
)

func main() {
	chart, release, namespace := os.Args[1], os.Args[2], os.Args[3]
	values, about := load(filepath.Join(chart, "values.yaml")), load(filepath.Join(chart, "Chart.yaml"))
	for _, more := range os.Args[4:] {
		merge(values, load(more))
	}
	files, err := filepath.Glob(filepath.Join(chart, "templates", "*"))
	must(err)
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
	all.Funcs(functions)
	for _, file := range files {
		text, err := os.ReadFile(file)
		must(err)
		_, err = all.New(filepath.Base(file)).Parse(string(text))
		must(err)
	}
	data := map[string]interface{}{
		"Values":  values,
		"Chart":   map[string]interface{}{"Name": about["name"], "Version": about["version"], "AppVersion": about["appVersion"]},
		"Release": map[string]interface{}{"Name": release, "Namespace": namespace, "Service": "Helm"},
	}
	for _, file := range files {
		if filepath.Ext(file) != ".yaml" {
			continue
		}
		var text bytes.Buffer
		must(all.ExecuteTemplate(&text, filepath.Base(file), data))
		fmt.Printf("---\n%s\n", strings.Trim(text.String(), "\n"))
	}
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
