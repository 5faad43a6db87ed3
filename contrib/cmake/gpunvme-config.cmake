# find_package(gpunvme), then target_link_libraries(program gpunvme::gpunvme)
if(NOT TARGET gpunvme::gpunvme)
  add_library(gpunvme::gpunvme SHARED IMPORTED)
  set_target_properties(gpunvme::gpunvme PROPERTIES
    IMPORTED_LOCATION "@LIBDIR@/libgpunvme.so.0"
    IMPORTED_SONAME libgpunvme.so.0
    INTERFACE_INCLUDE_DIRECTORIES "@PREFIX@/include")
endif()
